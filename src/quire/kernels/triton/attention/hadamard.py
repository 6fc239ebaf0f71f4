"""Device functions that multiply vectors by an orthonormal Hadamard matrix, in fp32.

What it is for says `attention/compact_kv.py`, whose `rotate_vectors` is the reference: sums are of
two terms, in the same order, so the bits are the same. Called by `rotary_kv_write.py`.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def in_order(low, high, D: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads of D elements as the parts of `rotary_kv_write.py`, [n, P] each -> [n, 2 P] fp32, each
    element at its place; zeros behind D."""
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
    """x [n, D] fp32, each SIZE elements of which are multiplied by the matrix. SIZE: a power of
    two; D: as well."""
    for step in tl.static_range(8):  # heads have at most 256 elements
        if 2**step < SIZE:
            x = _add(x, 2**step)
    # The reference multiplies by the fp32 number nearest to this.
    return x * (SIZE**-0.5)


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, DISTANCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of elements DISTANCE apart, their sum and their difference."""
    n: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    pairs = x.reshape(n, D // (2 * DISTANCE), 2, DISTANCE).permute(0, 1, 3, 2)
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return pairs.permute(0, 1, 3, 2).reshape(n, D)
