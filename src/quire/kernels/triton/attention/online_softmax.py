"""Device functions of online softmax, which sees its keys in pieces.

Keys come tile by tile and chunk by chunk. For one row of scores s, in units of log2, with the
values v of the keys seen so far:

    m = max s,   sums = sum 2^(s - m),   acc = sum 2^(s - m) v        (arXiv:1805.02867)

Two such parts of disjoint keys fold into one, and a part that saw no key, (-inf, 0, 0), changes no
bit of another. The multiply-adds are written as such: a compiler that was free to fuse them or not
would give the kernels that share these functions different bits.

Called by `paged_attention.py` and `merge_parts.py`; knows nothing of memory.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(m):  # type: ignore[no-untyped-def]
    """m, or 0 where it is -inf: what may be subtracted from -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fold_scales(m, sums, other_m, other_sums):  # type: ignore[no-untyped-def]
    """What `fold` does but for acc -> (m, sums, and by what each acc is multiplied)."""
    new_m = tl.maximum(m, other_m)
    base = finite_or_zero(new_m)
    scale = tl.exp2(m - base)
    other_scale = tl.exp2(other_m - base)
    sums = tl.fma(sums, scale, other_sums * other_scale)
    return new_m, sums, scale, other_scale


@triton.jit
def fold_outputs(acc, scale, other_acc, other_scale):  # type: ignore[no-untyped-def]
    """acc [n, D] of a part and of one of later keys, with their scales [n]."""
    return tl.fma(acc, tl.broadcast_to(scale[:, None], acc.shape), other_acc * other_scale[:, None])


@triton.jit
def fold(m, sums, acc, other_m, other_sums, other_acc):  # type: ignore[no-untyped-def]
    """A part and one of later keys -> both together. m and sums are [n], acc is [n, D]."""
    m, sums, scale, other_scale = fold_scales(m, sums, other_m, other_sums)
    return m, sums, fold_outputs(acc, scale, other_acc, other_scale)


@triton.jit
def finish(m, sums, acc, sinks):  # type: ignore[no-untyped-def]
    """-> (output, natural log of the sum of exponentials). sinks: [n] in natural units, or None.

    A row that saw nothing gives 0, and -inf without a sink.
    """
    if sinks is not None:
        new_m = tl.maximum(m, sinks * LOG2_E)
        scale = tl.exp2(m - new_m)
        log2_e = tl.full(sinks.shape, LOG2_E, tl.float32)
        sums = tl.fma(sums, scale, tl.exp2(tl.fma(sinks, log2_e, -new_m)))
        acc = acc * scale[:, None]
        m = new_m
    some = tl.where(sums == 0.0, 1.0, sums)
    lse = tl.where(sums == 0.0, float("-inf"), (m + tl.log2(some)) * LN_2)
    return acc / some[:, None], lse
