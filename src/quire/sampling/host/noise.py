"""Random numbers as a pure function of seed, branch, position and token.

The generator has no state. The noise for token t at absolute position p of branch b under seed s
depends on (s, b, p, t) alone. So a sequence draws the same numbers whichever sequences run beside
it, and draws them again after a preemption, a fork or a crash. Tokens that can't win need no random
numbers.

    stream  = mix(mix(seed + G) + (branch + 1) G)      once per row
    key     = mix(stream + (position + 1) G)           once per row and step
    bits    = mix(key + (token id + 1) G) >> 12        52 bits for each token
    uniform = (bits + 1/2) / 2**52                     in (0, 1), exact in fp64, never 0 or 1
    gumbel  = -log(-log1p(-uniform))                   large where uniform is small

All sums are modulo 2**64. `mix` and G are SplitMix64's finalizer and increment (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), so the bits of a position's
tokens are the outputs of SplitMix64 seeded with `key`. Large noise decides the result, so the
formulas derive it from small uniforms: floats are densest near zero.

`choice.py` uses numpy for the few tokens that can win, and torch for an upper bound on the noise of
all others.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

UInt64s = npt.NDArray[np.uint64]

INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
UNIFORM_BITS = 52


def mix(z: UInt64s) -> UInt64s:
    """SplitMix64's finalizer for each element, which is a bijection of 64 bits."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z ^ (z >> np.uint64(SHIFTS[-1]))


def _nth(start: UInt64s, index: npt.NDArray[np.integer]) -> UInt64s:
    """The output number `index` (from 0) of SplitMix64 seeded with `start`."""
    return mix(start + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(INCREMENT))


def stream(seed: int, branch_index: int) -> np.uint64:
    """The stream of a branch under a seed of 64 unsigned bits, for `row_keys`."""
    seeded = _nth(np.array([seed], dtype=np.uint64), np.array([0]))
    return np.uint64(_nth(seeded, np.array([branch_index]))[0])


def row_keys(streams: UInt64s, positions: npt.NDArray[np.integer]) -> UInt64s:
    """The keys [R] of rows that sample tokens at absolute `positions` [R]."""
    return _nth(streams, positions)


def uniforms(keys: UInt64s, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """The exact uniforms of keys and token ids, which broadcast against each other."""
    bits = _nth(keys, token_ids) >> np.uint64(64 - UNIFORM_BITS)
    return (bits.astype(np.float64) + 0.5) * 2.0**-UNIFORM_BITS


def exponential(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The unit exponential at a uniform; `gumbel` is minus its logarithm."""
    return -np.log1p(-uniform)


def gumbel(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The standard Gumbel noise at a uniform; between -3.7 and 36.8."""
    return -np.log(exponential(uniform))


@lru_cache(maxsize=8)
def vocabulary_counters(vocab_size: int) -> torch.Tensor:
    """The `token_counters` of the whole vocabulary, [1, vocab_size]; shared, so never written."""
    return token_counters(torch.arange(vocab_size).unsqueeze(0))


def token_counters(token_ids: torch.Tensor) -> torch.Tensor:
    """The number that each int64 token id adds to its row's key."""
    return (token_ids + 1) * _signed(INCREMENT)


def coarse_uniforms(keys: UInt64s, counters: torch.Tensor) -> torch.Tensor:
    """All uniforms [R, W] times 2**52, in fp32 with a relative error of at most 2**-22.

    `keys` are [R]. `counters` are [R, W], or [1, W] if all rows have the same tokens.
    """
    key_column = torch.from_numpy(keys.view(np.int64)).unsqueeze(1)
    return _mix_to_bits(key_column + counters).to(torch.float32).add_(0.5)


def _mix_to_bits(z: torch.Tensor) -> torch.Tensor:
    """Computes `mix(z) >> 12` in place on int64.

    A mask follows each shift, since torch has no unsigned shifts of 64 bits.
    """
    shifted = torch.empty_like(z)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            z.mul_(_signed(multiplier))
    return z.bitwise_right_shift_(64 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned number, since torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value
