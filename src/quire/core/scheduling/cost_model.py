"""Seconds of a step, predicted from what it computes.

Fitted to measured steps, and adjusted to those that follow. Reads no clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Segments of the token axis: [1, 2], [2, 4], ... and the last is open: from 1024 on.
NUM_SEGMENTS = 11
_FIXED = 0
_FIRST_SEGMENT = 1
_ROWS = _FIRST_SEGMENT + NUM_SEGMENTS
DECODE_PAIRS, CHUNK_PAIRS = _ROWS + 1, _ROWS + 2
_LOGPROB_TOKENS = _ROWS + 3
_NUM_PARTS = _ROWS + 4

# Of a step's surprise, so much is learned, and at most such a share of what was predicted.
LEARNING_RATE = 0.1
MAX_SURPRISE = 0.5
# A part that is predicted to take nothing learns with at least this share of the step.
LEAST_SHARE = 0.02

# No step takes less. Where one is predicted to, there is no share of it to learn from.
SHORTEST_S = 1e-9

# How much neighbouring slopes pull at each other: enough to settle those that nothing measured.
_SMOOTHNESS = 0.02
_NUM_SWEEPS = 400


class StepLoad(NamedTuple):
    """What one step computes.

    num_decodes: rows that compute one token. num_chunk_tokens: tokens of all others.
    num_decode_pairs, num_chunk_pairs: for each such token, the tokens that it attends to, summed.
    num_logprob_tokens: those of num_chunk_tokens whose log-probabilities are asked for.
    num_chunks, num_context_tokens: the rows that compute num_chunk_tokens, and the tokens that they
        have after the step, whose K and V it reads.
    """

    num_decodes: int = 0
    num_decode_pairs: int = 0
    num_chunk_tokens: int = 0
    num_chunk_pairs: int = 0
    num_logprob_tokens: int = 0
    num_chunks: int = 0
    num_context_tokens: int = 0

    def with_chunk(
        self, num_computed_tokens: int, num_new_tokens: int, *, wants_logprobs: bool = False
    ) -> "StepLoad":
        """This and a chunk of a sequence that has num_computed_tokens before it, and may want the
        log-probabilities of its prompt."""
        pairs = num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) // 2
        return StepLoad(
            self.num_decodes,
            self.num_decode_pairs,
            self.num_chunk_tokens + num_new_tokens,
            self.num_chunk_pairs + pairs,
            self.num_logprob_tokens + (num_new_tokens if wants_logprobs else 0),
            self.num_chunks + (num_new_tokens > 0),
            self.num_context_tokens + num_computed_tokens + num_new_tokens,
        )


NO_LOAD = StepLoad()


class StepSample(NamedTuple):
    """A step that was measured."""

    load: StepLoad
    seconds: float


class StepCostModel:
    """Seconds of a step, predicted from what it computes.

    A sum of non-negative parts: a fixed one, a piecewise linear function of the step's tokens (its
    corners are the powers of two: products of few rows reach less than those of many), one per
    decoding row (vocabulary, sampling), one per prompt token whose log-probabilities are asked for,
    and two for attention: token pairs of decoding rows, bound by memory, and of chunks, bound by
    arithmetic.

        fixed + sum_i slope_i * (tokens of the step between 2^i and 2^(i+1))
            + per_row * decoding rows + per_logprob_token * tokens of prompts
            + per_decode_pair * pairs + per_chunk_pair * pairs

    `runtime.calibration` fits it to steps measured at start-up; then it follows what steps take by
    least mean squares with clipped errors: an outlier moves it by a few percent. Reads no clock.

    Invariant: all coefficients are at least 0, so `predict_s` grows with each part of a load.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        """coefficients: another model's; to make one from steps, use `fit`."""
        assert len(coefficients) == _NUM_PARTS and min(coefficients) >= 0, coefficients
        self._coefficients = list(coefficients)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """All that the model knows, to send it elsewhere."""
        return tuple(self._coefficients)

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> "StepCostModel":
        """The non-negative least squares of relative errors over samples, at least one.

        Slopes of segments that no sample distinguishes are as alike as possible.
        """
        assert samples and all(sample.seconds > 0 for sample in samples), samples
        matrix = [[0.0] * _NUM_PARTS for _ in range(_NUM_PARTS)]
        target = [0.0] * _NUM_PARTS
        for load, seconds in samples:
            row = [part / seconds for part in load_parts(load)]
            _accumulate(matrix, row)
            for index, value in enumerate(row):
                target[index] += value
        longest_s = max(sample.seconds for sample in samples)
        most_tokens = max(load.num_decodes + load.num_chunk_tokens for load, _ in samples)
        for segment in range(NUM_SEGMENTS - 1):
            weight = _SMOOTHNESS * min(1 << segment, most_tokens) / longest_s
            row = [0.0] * _NUM_PARTS
            row[_FIRST_SEGMENT + segment], row[_FIRST_SEGMENT + segment + 1] = weight, -weight
            _accumulate(matrix, row)
        return cls(_solve(matrix, target))

    def predict_s(self, load: StepLoad) -> float:
        """How long a step with this load takes."""
        values = self._coefficients
        num_tokens = max(1, load.num_decodes + load.num_chunk_tokens)
        last = min(num_tokens.bit_length(), NUM_SEGMENTS) - 1
        seconds = values[_FIXED] + values[_FIRST_SEGMENT + last] * (num_tokens - (1 << last))
        for segment in range(last):
            seconds += values[_FIRST_SEGMENT + segment] * (1 << segment)
        return (
            seconds
            + values[_ROWS] * load.num_decodes
            + values[DECODE_PAIRS] * load.num_decode_pairs
            + values[CHUNK_PAIRS] * load.num_chunk_pairs
            + values[_LOGPROB_TOKENS] * load.num_logprob_tokens
        )

    def most_tokens(
        self,
        limit_s: float,
        load: StepLoad,
        num_computed: int,
        most: int,
        *,
        wants_logprobs: bool = False,
    ) -> int:
        """The longest chunk, of at most `most` tokens, that a sequence with num_computed tokens
        may add to `load` so that the step takes at most limit_s; 0 where none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            longer = load.with_chunk(num_computed, middle, wants_logprobs=wants_logprobs)
            if self.predict_s(longer) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that has ended.

        The surprise is shared out over the parts by the square of what they take: Kaczmarz's
        projection, in coordinates where each coefficient is 1. Tokens of a segment count as taking
        no less than those of its neighbours: else a slope that is wrongly nearly 0 stays so.
        """
        predicted_s = self.predict_s(load)
        if predicted_s < SHORTEST_S:  # nothing is known of such a step: its coefficients are 0
            self._coefficients[_FIXED] += seconds
            return
        bound_s = MAX_SURPRISE * predicted_s
        surprise_s = LEARNING_RATE * max(-bound_s, min(bound_s, seconds - predicted_s))
        parts, values = load_parts(load), self._coefficients
        least_s = LEAST_SHARE * predicted_s
        shares = [
            (part * value + least_s) ** 2 if part else 0.0
            for part, value in zip(parts, _with_neighbours(values), strict=True)
        ]
        scale = surprise_s / sum(shares)
        for index, part in enumerate(parts):
            if part:
                values[index] = max(0.0, values[index] + scale * shares[index] / part)


def _with_neighbours(values: Sequence[float]) -> list[float]:
    """Coefficients with each slope raised to the larger one of its neighbours'."""
    slopes = [0.0, *values[_FIRST_SEGMENT:_ROWS], 0.0]
    raised = map(max, slopes, slopes[1:], slopes[2:])
    return [*values[:_FIRST_SEGMENT], *raised, *values[_ROWS:]]


def load_parts(load: StepLoad) -> list[float]:
    """What the coefficients are multiplied with."""
    num_tokens = load.num_decodes + load.num_chunk_tokens
    parts = [0.0] * _NUM_PARTS
    parts[_FIXED] = 1.0
    for segment in range(NUM_SEGMENTS):
        first = 1 << segment
        if num_tokens <= first:
            break
        is_open = segment == NUM_SEGMENTS - 1
        parts[_FIRST_SEGMENT + segment] = (
            num_tokens - first if is_open else min(num_tokens - first, first)
        )
    parts[_ROWS] = load.num_decodes
    parts[DECODE_PAIRS] = load.num_decode_pairs
    parts[CHUNK_PAIRS] = load.num_chunk_pairs
    parts[_LOGPROB_TOKENS] = load.num_logprob_tokens
    return parts


def _accumulate(matrix: list[list[float]], row: Sequence[float]) -> None:
    """Add the outer product of `row` with itself."""
    for index, value in enumerate(row):
        if value:
            line = matrix[index]
            for other, factor in enumerate(row):
                line[other] += value * factor


def _solve(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The x >= 0 with the least x'Mx/2 - t'x, by coordinate descent: each step is exact in one
    coordinate, so the value never rises. A coordinate that nothing depends on stays 0."""
    solution = [0.0] * len(target)
    for _ in range(_NUM_SWEEPS):
        for index, line in enumerate(matrix):
            if line[index]:
                slope = target[index] - sum(a * x for a, x in zip(line, solution, strict=True))
                solution[index] = max(0.0, solution[index] + slope / line[index])
    return solution
