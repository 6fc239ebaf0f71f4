"""Device functions that multiply vectors by an orthonormal Hadamard matrix, in fp32.

The reference is `rotate_vectors` of `attention/quantized_kv.py`, which also says why K is rotated.
All sums have two terms, in the same order, so the bits are the same. Called by
`rotary_kv_write.py`.
"""

import triton
import triton.language as tl

from quire.kernels.triton.rotation import rotate_blocks


@triton.jit  # type: ignore[untyped-decorator]
def in_order(low, high, D: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Joins the two parts [n, P] of heads, as `rotary_kv_write.py` has them, to [n, 2 P] fp32.

    The D elements of each head are in their order, followed by zeros.
    """
    PART: tl.constexpr = low.shape[1]
    x = tl.join(low.to(tl.float32), high.to(tl.float32)).permute(0, 2, 1)
    x = x.reshape(low.shape[0], 2 * PART)
    if R < D or D < 2 * PART:
        dims = tl.arange(0, 2 * PART)
        places = tl.where(dims < R // 2, dims, PART + dims - R // 2)
        of_rest = tl.where(dims < R // 2 + D // 2, dims - R // 2, PART + dims - D // 2)
        places = tl.where(dims < R, places, of_rest)
        places = tl.where(dims < D, places, 0)
        x = tl.gather(x, tl.broadcast_to(places[None, :], x.shape), axis=1)
        x = tl.where((dims < D)[None, :], x, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def hadamard(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [n, D] fp32 with each SIZE elements multiplied by the orthonormal matrix.

    SIZE is a power of two of at most 256, and D a power of two.
    """
    # The reference too multiplies by the fp32 number nearest to SIZE^-0.5.
    return rotate_blocks(x, SIZE) * (SIZE**-0.5)
