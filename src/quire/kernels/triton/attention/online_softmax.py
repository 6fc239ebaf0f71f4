"""Device functions of online softmax, which processes its keys in pieces.

Keys come tile by tile and chunk by chunk. A part is the state of one row of scores s, in units of
log2, for the values v of some keys:

    m = max s,   sums = sum 2^(s - m),   acc = sum 2^(s - m) v        (arXiv:1805.02867)

Two parts of disjoint keys are folded into one part. Folding in a part without keys, (-inf, 0, 0),
changes no bit. Fused multiply-adds are explicit: if the compiler chose where to fuse, kernels that
share these functions would get different bits.

Called by `paged_attention.py`, `latent_attention.py` and `merge_parts.py`; accesses no memory.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(m):  # type: ignore[no-untyped-def]
    """m, or 0 instead of -inf, which can't be subtracted from -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fold_scales(m, sums, other_m, other_sums):  # type: ignore[no-untyped-def]
    """Folds two parts without acc -> (m, sums, factor of acc, factor of other_acc)."""
    new_m = tl.maximum(m, other_m)
    base = finite_or_zero(new_m)
    scale = tl.exp2(m - base)
    other_scale = tl.exp2(other_m - base)
    sums = tl.fma(sums, scale, other_sums * other_scale)
    return new_m, sums, scale, other_scale


@triton.jit
def fold_outputs(acc, scale, other_acc, other_scale):  # type: ignore[no-untyped-def]
    """acc * scale + other_acc * other_scale, for acc [n, D] of a part and of a part of later
    keys."""
    return tl.fma(acc, tl.broadcast_to(scale[:, None], acc.shape), other_acc * other_scale[:, None])


@triton.jit
def fold(m, sums, acc, other_m, other_sums, other_acc):  # type: ignore[no-untyped-def]
    """Folds a part with a part of later keys. m and sums are [n], acc is [n, D]."""
    m, sums, scale, other_scale = fold_scales(m, sums, other_m, other_sums)
    return m, sums, fold_outputs(acc, scale, other_acc, other_scale)


@triton.jit
def finish(m, sums, acc, sinks):  # type: ignore[no-untyped-def]
    """The output, and the natural log of the sum of exponentials, of a part with all keys.

    `sinks` are [n] scores in natural units, or None. A row without keys has the output 0, and a
    logarithm of -inf if it has no sink.
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
