"""Random numbers as a pure function of where they are used.

There is no generator that has a state. The noise that decides for token t at absolute position p of
branch b under seed s depends on (s, b, p, t) alone. So a sequence draws the same numbers whatever
runs beside it, and again after a preemption, a fork or a crash; and only the tokens that are still
in the race need to draw at all.

    stream  = mix(mix(seed + G) + (branch + 1) G)      once per row
    key     = mix(stream + (position + 1) G)           once per row and step
    bits    = mix(key + (token id + 1) G) >> 12        52 bits for each token
    uniform = (bits + 1/2) / 2**52                     in (0, 1), exact in fp64, never 0 or 1
    gumbel  = -log(-log1p(-uniform))                   large where uniform is small

All sums modulo 2**64; `mix` and G are SplitMix64's finalizer and increment (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), so the tokens of a position read
that generator's outputs from the seed `key`. The uniform's small side makes the large noise because
floats are dense near zero, and it is the largest noise that decides.

`choice.py` calls this: numpy for the few tokens that can win, torch for a bound on all the others.
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
    """SplitMix64's finalizer, element by element: a bijection of 64 bits."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z ^ (z >> np.uint64(SHIFTS[-1]))


def _nth(start: UInt64s, index: npt.NDArray[np.integer]) -> UInt64s:
    """Output number `index` (from 0) of SplitMix64 seeded with `start`."""
    return mix(start + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(INCREMENT))


def stream(seed: int, branch_index: int) -> np.uint64:
    """The number that stands for (seed, branch) in `row_keys`. seed: 64 unsigned bits."""
    seeded = _nth(np.array([seed], dtype=np.uint64), np.array([0]))
    return np.uint64(_nth(seeded, np.array([branch_index]))[0])


def row_keys(streams: UInt64s, positions: npt.NDArray[np.integer]) -> UInt64s:
    """The keys of rows that sample their tokens at absolute `positions`; both [R]."""
    return _nth(streams, positions)


def uniforms(keys: UInt64s, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """The exact uniforms of (key, token id) pairs, which broadcast against each other."""
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
    """`token_counters` of the whole vocabulary, [1, vocab_size]; shared, so not to be written."""
    return token_counters(torch.arange(vocab_size).unsqueeze(0))


def token_counters(token_ids: torch.Tensor) -> torch.Tensor:
    """What each int64 token id adds to its row's key."""
    return (token_ids + 1) * _signed(INCREMENT)


def coarse_uniforms(keys: UInt64s, counters: torch.Tensor) -> torch.Tensor:
    """All uniforms times 2**52, rounded to fp32: within 2**-22 of the exact ones, relatively.

    keys: [R]; counters: [R, W], or [1, W] for the same tokens in each row. Returns [R, W].
    """
    key_column = torch.from_numpy(keys.view(np.int64)).unsqueeze(1)
    return _mix_to_bits(key_column + counters).to(torch.float32).add_(0.5)


def _mix_to_bits(z: torch.Tensor) -> torch.Tensor:
    """`mix(z) >> 12` in place on int64; torch has no 64-bit unsigned shifts, so a mask follows."""
    shifted = torch.empty_like(z)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            z.mul_(_signed(multiplier))
    return z.bitwise_right_shift_(64 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1)


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch wants."""
    return value - (1 << 64) if value >= 1 << 63 else value
