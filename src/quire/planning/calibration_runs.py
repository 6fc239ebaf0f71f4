"""Draws calibration runs: random groups of requests, with which step times are measured.

In a calibration run, some rows decode after a context, and then prompts join them in waves. The
steps of all runs range from one row to many, from short contexts to long ones, and from one prompt
token to a full step. Contexts come from the prefix cache: `measuring` stores them there without
computing them. The number of a run is its random seed, so every measurement draws the same runs."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

#: Number of steps that are measured before prompts join.
NUM_STEADY_STEPS = 3
#: Number of steps that are measured after each wave of prompts. The processor's caches recover in
#: fewer steps.
NUM_SETTLING_STEPS = 10
#: Maximum number of tokens that a sequence of a run generates.
LONGEST_ANSWER = 32
#: Tokens that the prompts of each wave generate. The first wave ends soon, so that the cost of
#: ending is measured; the second wave ends after the caches have recovered.
ANSWERS = (2, 8)
#: Tokens reserved for each joining prompt: its answer and the unused rest of its last block.
_SHORT_ANSWER = max(ANSWERS) + 16
#: Maximum number of prompts that join in one step.
MOST_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class RunBounds:
    """Upper bounds of the sizes in a calibration run."""

    num_rows: int
    #: Number of prompt tokens in a step.
    num_chunk_tokens: int
    #: Number of tokens of a sequence.
    context: int
    #: Number of tokens that the KV cache holds.
    num_slots: int


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """Rows that decode, and waves of prompts that join them."""

    #: For each decoding row, the number of tokens of its context.
    contexts: tuple[int, ...]
    #: For each wave, (cached tokens, uncached tokens) of each prompt that joins.
    waves: tuple[tuple[tuple[int, int], ...], ...]
    #: The limit of prompt tokens in a step.
    most_tokens: int


def draw_runs(bounds: RunBounds) -> Iterator[CalibrationRun]:
    """Yield runs without end. The first runs have sizes at the corners of the bounds."""
    yield from _corners(bounds)
    for number in range(1 << 30):
        yield _draw(random.Random(f"run {number}"), bounds)


def _corners(bounds: RunBounds) -> Iterator[CalibrationRun]:
    short, most = min(16, bounds.context), bounds.num_chunk_tokens
    chunk = min(most, bounds.num_slots // 4, bounds.context)
    many = max(1, min(bounds.num_rows, bounds.num_slots // (2 * (short + LONGEST_ANSWER))))
    few = max(1, min(2, bounds.num_slots // (2 * bounds.context)))
    each = max(1, min(bounds.context, bounds.num_slots * 9 // 10 // many - LONGEST_ANSWER))
    yield CalibrationRun((short,), (((0, chunk),),), most)
    yield CalibrationRun((short,) * max(1, many - 1), (((0, max(1, chunk // 8)),),), most)
    yield CalibrationRun(
        (bounds.context,) * few, (((bounds.context // 2, max(1, chunk // 16)),),), most
    )
    yield CalibrationRun((each,) * many, (), most)


def _draw(rng: random.Random, bounds: RunBounds) -> CalibrationRun:
    num_rows = _log_uniform(rng, 1, bounds.num_rows)
    num_left = bounds.num_slots - LONGEST_ANSWER * num_rows
    longest = max(8, min(bounds.context, 3 * num_left // (4 * num_rows)))
    middle = _log_uniform(rng, 8, longest)
    contexts = tuple(max(1, rng.randint(middle // 2, middle)) for _ in range(num_rows))
    num_left -= sum(contexts)
    size = _log_uniform(rng, 4, bounds.num_chunk_tokens)
    waves = []
    for _ in ANSWERS:
        wave: list[tuple[int, int]] = []
        num_prompts = rng.choice((1, 1, 1, 2, 4, MOST_PROMPTS))
        for _ in range(num_prompts):
            own = max(1, rng.randint(size // 2, size) // num_prompts)
            is_cached = rng.random() < 1 / 3
            cached = _log_uniform(rng, 1, bounds.context) // num_prompts if is_cached else 0
            if own + cached + _SHORT_ANSWER > min(num_left, bounds.context):
                continue
            if num_rows + len(wave) < bounds.num_rows:
                wave.append((cached, own))
                num_left -= own + cached + _SHORT_ANSWER
        waves.append(tuple(wave))
    most = rng.choice((bounds.num_chunk_tokens, *(max(4, size // part) for part in (2, 4, 8))))
    return CalibrationRun(contexts, tuple(waves), most)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    if high <= low:
        return low
    return min(high, round(low * math.exp(rng.random() * math.log(high / low))))
