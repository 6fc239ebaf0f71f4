"""The sampling noise of `sampling.host.noise` as Triton device functions.

The uniform bits are exactly the same. The Gumbel number is computed in a coarse and an exact form.

    bits   = mix(key + (token id + 1) G) >> 12       52 bits, G and mix as in SplitMix64
    u      = (bits + 1/2) / 2**52,  e = -log(1 - u),  gumbel = -log(e)

`coarse_gumbel` is in fp32, for every token; its error is below COARSE_ERROR. `exact_score` is in
fp64, which costs 64 times as much on many GPUs. It is computed only for tokens whose coarse scores
are too close to the best score to be told apart.

For small u, `coarse_gumbel` computes e by a series in u, whose first omitted term is 1e-6 of e. For
other u it takes the logarithm of 1 - u, which is computed from the bits' complement to avoid
cancellation. COARSE_ERROR assumes that the device's logarithm has an absolute error of at most
52 * 2**-22 (its values stay below 52), and of at most 1e-5 near zero.

Called by `gumbel_sample.py`.
"""

import triton
import triton.language as tl

INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_1 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-52)
_SMALL = tl.constexpr(1.0 / 64)
_THIRD = tl.constexpr(1.0 / 3)

#: Bound of the absolute error of `coarse_gumbel`.
COARSE_ERROR = 1e-4


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MULTIPLIER_0
    z = (z ^ (z >> 27)) * _MULTIPLIER_1
    return z ^ (z >> 31)


@triton.jit
def row_key(stream, position):  # type: ignore[no-untyped-def]
    """The key of a row's noise at `position`, an int64. `stream` is an int64 bit pattern."""
    return _mix(stream.to(tl.uint64) + (position + 1).to(tl.uint64) * INCREMENT)


@triton.jit
def _bits(key, token_ids):  # type: ignore[no-untyped-def]
    return _mix(key + (token_ids + 1).to(tl.uint64) * INCREMENT) >> 12


@triton.jit
def coarse_gumbel(key, token_ids):  # type: ignore[no-untyped-def]
    """The Gumbel numbers of int32 token ids, in fp32."""
    bits = _bits(key, token_ids).to(tl.int64)
    u = (bits.to(tl.float32) + 0.5) * _UNIT
    rest = ((0x10000000000000 - bits).to(tl.float32) - 0.5) * _UNIT
    e = tl.where(u < _SMALL, u * (1.0 + u * (0.5 + u * _THIRD)), -tl.log(rest))
    return -tl.log(e)


@triton.jit
def exact_score(x, key, token_id):  # type: ignore[no-untyped-def]
    """x + gumbel in fp64; x is fp32. 1 - u is exact in fp64, so its logarithm is log1p(-u)."""
    bits = _bits(key, token_id).to(tl.int64)
    rest = ((0x10000000000000 - bits).to(tl.float64) - 0.5) * _UNIT
    return x.to(tl.float64) - tl.log(-tl.log(rest))
