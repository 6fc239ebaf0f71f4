"""Device functions that multiply blocks of numbers by a Hadamard matrix.

The references are `kernels.quantize.rotate_blocks` and `attention.kv_format.rotate_vectors`;
`attention.quantized_kv` says why K is rotated. All sums have two terms, in the same order, so the
bits are the same. Called by `attention/rotary_kv_write.py` and `linear/quantize_groups.py`.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rotate_blocks(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [n, D] fp32, with each block of SIZE elements of a row multiplied by the matrix of ones and
    minus ones.

    SIZE is a power of two of at most 256, and D a power of two that is at least SIZE.
    """
    for step in tl.static_range(8):
        if 2**step < SIZE:
            x = _add(x, 2**step)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def hadamard(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [n, D] fp32 with the same blocks multiplied by the orthonormal matrix.

    SIZE is a power of two of at most 256, and D a power of two.
    """
    # The reference too multiplies by the fp32 number nearest to SIZE^-0.5.
    return rotate_blocks(x, SIZE) * (SIZE**-0.5)


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, DISTANCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replaces each pair of elements DISTANCE apart by their sum and their difference."""
    n: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    pairs = x.reshape(n, D // (2 * DISTANCE), 2, DISTANCE).permute(0, 1, 3, 2)
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return pairs.permute(0, 1, 3, 2).reshape(n, D)
