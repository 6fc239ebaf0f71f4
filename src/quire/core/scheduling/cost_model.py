"""A cost model that predicts a step's duration from the work it computes.

The model is fitted to steps measured at start-up, then adjusted to each later step. Reads no clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Number of segments of the token axis: [1, 2], [2, 4], ..., [1024, infinity).
NUM_SEGMENTS = 11
_FIXED = 0
_FIRST_SEGMENT = 1
_ROWS = _FIRST_SEGMENT + NUM_SEGMENTS
DECODE_PAIRS, CHUNK_PAIRS = _ROWS + 1, _ROWS + 2
_LOGPROB_TOKENS = _ROWS + 3
_DRAFTS = _ROWS + 4
_DRAFTING = _ROWS + 5
_NUM_PARTS = _ROWS + 6

# LEARNING_RATE: fraction of a prediction error by which the model is corrected. MAX_SURPRISE: an
# error is clipped to this fraction of the prediction.
LEARNING_RATE = 0.1
MAX_SURPRISE = 0.5
# For the distribution of an error over the parts, this share of the predicted time is added to the
# time of each part, so that no part is left out.
LEAST_SHARE = 0.02

DRAFTING_S = 1e-4
"""The seconds that a step takes to plan and verify drafts at all, until they were learned."""

# A shorter prediction counts as unknown, because an error can't be distributed over its parts.
SHORTEST_S = 1e-9

# How strongly neighbouring slopes are pulled together; this determines slopes without measurements.
_SMOOTHNESS = 0.02
_NUM_SWEEPS = 400


class StepLoad(NamedTuple):
    """The work of one step, in counts."""

    #: Number of tokens at which decoding rows sample: one of each row, and its drafts.
    num_decodes: int = 0
    #: Number of tokens that a decoding row's token attends to, summed over the rows. The row's
    #: drafts read the same tokens with it, and count as pairs of chunks.
    num_decode_pairs: int = 0
    #: Number of tokens that all other rows compute, in chunks.
    num_chunk_tokens: int = 0
    #: Number of tokens that a chunk's token attends to, summed over all tokens of all chunks, and
    #: over drafts.
    num_chunk_pairs: int = 0
    #: Number of chunk tokens whose log-probabilities are wanted.
    num_logprob_tokens: int = 0
    #: Number of rows that compute chunks.
    num_chunks: int = 0
    #: Number of tokens that the rows with chunks have after the step, which reads their K and V.
    num_context_tokens: int = 0
    #: Number of drafts, which num_decodes counts, too.
    num_drafts: int = 0
    #: Number of tokens that decoding rows compute before the token at which they sample: drafts
    #: that were accepted, in models with states.
    num_replay_tokens: int = 0

    def with_chunk(
        self, num_computed_tokens: int, num_new_tokens: int, *, wants_logprobs: bool = False
    ) -> "StepLoad":
        """Return this load with one more chunk, which starts after num_computed_tokens tokens of
        its sequence."""
        pairs = num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) // 2
        return StepLoad(
            self.num_decodes,
            self.num_decode_pairs,
            self.num_chunk_tokens + num_new_tokens,
            self.num_chunk_pairs + pairs,
            self.num_logprob_tokens + (num_new_tokens if wants_logprobs else 0),
            self.num_chunks + (num_new_tokens > 0),
            self.num_context_tokens + num_computed_tokens + num_new_tokens,
            self.num_drafts,
            self.num_replay_tokens,
        )

    def with_drafts(self, num_computed_tokens: int, num_drafts: int) -> "StepLoad":
        """Return this load with drafts for a row whose token it has already."""
        pairs = num_drafts * (num_computed_tokens + 1) + num_drafts * (num_drafts + 1) // 2
        return StepLoad(  # `_replace` would take twice as long
            self.num_decodes + num_drafts,
            self.num_decode_pairs,
            self.num_chunk_tokens,
            self.num_chunk_pairs + pairs,
            self.num_logprob_tokens,
            self.num_chunks,
            self.num_context_tokens,
            self.num_drafts + num_drafts,
            self.num_replay_tokens,
        )

    def without_drafts(self, num_drafts: int) -> "StepLoad":
        """Return this load without some of its drafts, but with their pairs in attention."""
        return self._replace(
            num_decodes=self.num_decodes - num_drafts, num_drafts=self.num_drafts - num_drafts
        )

    def with_replay(self, num_computed_tokens: int, num_tokens: int) -> "StepLoad":
        """Return this load with tokens that a decoding row, which it has already, computes before
        the token at which it samples."""
        pairs = num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) // 2
        return self._replace(
            num_chunk_pairs=self.num_chunk_pairs + pairs,
            num_replay_tokens=self.num_replay_tokens + num_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return self.num_decodes + self.num_chunk_tokens + self.num_replay_tokens


NO_LOAD = StepLoad()


class StepSample(NamedTuple):
    """The measured duration of a step."""

    load: StepLoad
    seconds: float


class StepCostModel:
    """Predicts the seconds of a step from its load.

    The prediction is a sum of non-negative parts. One part is fixed. One part is piecewise linear
    in the step's tokens, with corners at powers of two, because products of few rows are less
    efficient. One part counts the tokens at which decoding rows sample (vocabulary, sampling),
    drafts included; another counts the drafts, whose samples may come one after the other; a third
    counts prompt tokens whose log-probabilities are wanted. Steps with drafts have a second fixed
    part, which is DRAFTING_S at first. Two parts count attention's pairs of query and key tokens:
    pairs of decoding rows, bound by memory, and pairs of chunks, bound by arithmetic.

            fixed + sum_i slope_i * (tokens of the step between 2^i and 2^(i+1))
                + per_row * decoding rows + per_logprob_token * prompt tokens with log-probabilities
                + per_decode_pair * pairs of decoding rows + per_chunk_pair * pairs of chunks
                + per_draft * drafts + (per_step_with_drafts, if there are any)

    `runtime.calibration` fits it to steps measured at start-up. Then it follows measured steps by
    least mean squares with clipped errors: an outlier moves it by a few percent. Reads no clock.

    Invariant: all coefficients are at least 0, so `predict_s` grows with each part of a load.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        """coefficients: the coefficients of another model; use `fit` to make a model from measured
        steps."""
        assert len(coefficients) == _NUM_PARTS and min(coefficients) >= 0, coefficients
        self._coefficients = list(coefficients)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The whole state of the model, to send it elsewhere."""
        return tuple(self._coefficients)

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> "StepCostModel":
        """Fit a model to samples (at least one): non-negative least squares of relative errors.

        If no sample distinguishes two segments, their slopes are as similar as possible.
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
        most_tokens = max(load.num_tokens for load, _ in samples)
        for segment in range(NUM_SEGMENTS - 1):
            weight = _SMOOTHNESS * min(1 << segment, most_tokens) / longest_s
            row = [0.0] * _NUM_PARTS
            row[_FIRST_SEGMENT + segment], row[_FIRST_SEGMENT + segment + 1] = weight, -weight
            _accumulate(matrix, row)
        solution = _solve(matrix, target)
        if not matrix[_DRAFTING][_DRAFTING]:  # no sample has drafts
            solution[_DRAFTING] = DRAFTING_S
        return cls(solution)

    def predict_s(self, load: StepLoad) -> float:
        """Predicted seconds of a step with this load."""
        values = self._coefficients
        num_tokens = max(1, load.num_tokens)
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
            + values[_DRAFTS] * load.num_drafts
            + values[_DRAFTING] * (load.num_drafts > 0)
        )

    def first_draft_s(self, load: StepLoad) -> float:
        """Predicted seconds that the first draft adds to a step with this load, without what its
        row's context adds."""
        values = self._coefficients
        segment = min(max(1, load.num_tokens).bit_length(), NUM_SEGMENTS) - 1
        row_s = values[_FIRST_SEGMENT + segment] + values[_ROWS]
        return row_s + values[_DRAFTS] + values[_DRAFTING]

    def most_tokens(
        self,
        limit_s: float,
        load: StepLoad,
        num_computed: int,
        most: int,
        *,
        wants_logprobs: bool = False,
    ) -> int:
        """The longest chunk, of at most `most` tokens, that fits beside `load` into limit_s.

        num_computed: tokens that its sequence has before the chunk. Returns 0 if none fits.
        """
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
        """Learn from the duration of a step that has ended.

        The error is distributed over the parts in proportion to the squares of their predicted
        times. This is Kaczmarz's projection in coordinates where each coefficient is 1. A segment's
        share is computed from the largest of its own and its neighbours' slopes; otherwise a slope
        that is wrongly near 0 would stay there.
        """
        predicted_s = self.predict_s(load)
        if predicted_s < SHORTEST_S:  # all coefficients of such a step are still 0
            self._coefficients[_FIXED] += seconds
            return
        bound_s = MAX_SURPRISE * predicted_s
        surprise_s = LEARNING_RATE * max(-bound_s, min(bound_s, seconds - predicted_s))
        values, least_s = self._coefficients, LEAST_SHARE * predicted_s
        parts = [(index, part) for index, part in enumerate(load_parts(load)) if part]
        shares = [(part * _raised(values, index) + least_s) ** 2 for index, part in parts]
        scale = surprise_s / sum(shares)
        for (index, part), share in zip(parts, shares, strict=True):
            values[index] = max(0.0, values[index] + scale * share / part)


# The typical seconds of the parts, relative to each other: rows are cheap as long as weights are
# read more slowly than rows are computed, here up to 8 rows.
_TYPICAL_FIXED, _TYPICAL_FREE, _TYPICAL_BOUND, _TYPICAL_ROW = 1.0, 0.03, 0.08, 0.005
_NUM_FREE_SEGMENTS = 3


def typical_model(load: StepLoad, seconds: float) -> StepCostModel:
    """A model for an unknown machine, on which one step of this load took `seconds`."""
    coefficients = [0.0] * _NUM_PARTS
    coefficients[_FIXED] = _TYPICAL_FIXED
    for segment in range(NUM_SEGMENTS):
        is_free = segment < _NUM_FREE_SEGMENTS
        coefficients[_FIRST_SEGMENT + segment] = _TYPICAL_FREE if is_free else _TYPICAL_BOUND
    coefficients[_ROWS] = coefficients[_LOGPROB_TOKENS] = _TYPICAL_ROW
    scale = seconds / StepCostModel(coefficients).predict_s(load)
    scaled = [scale * value for value in coefficients]
    scaled[_DRAFTING] = DRAFTING_S
    return StepCostModel(scaled)


def _raised(values: Sequence[float], index: int) -> float:
    """A coefficient; of a slope, the maximum of itself and its neighbours."""
    if not _FIRST_SEGMENT <= index < _ROWS:
        return values[index]
    return max(values[max(_FIRST_SEGMENT, index - 1) : min(index + 2, _ROWS)])


def load_parts(load: StepLoad) -> list[float]:
    """The quantities of a load that the coefficients multiply, one for each coefficient."""
    num_tokens = load.num_tokens
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
    parts[_DRAFTS] = load.num_drafts
    parts[_DRAFTING] = load.num_drafts > 0
    return parts


def _accumulate(matrix: list[list[float]], row: Sequence[float]) -> None:
    """Add the outer product of `row` with itself to `matrix`."""
    for index, value in enumerate(row):
        if value:
            line = matrix[index]
            for other, factor in enumerate(row):
                line[other] += value * factor


def _solve(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The x >= 0 that minimizes x'Mx/2 - t'x, by coordinate descent.

    Each step is exact in one coordinate, so the value never rises. A coordinate that nothing
    depends on stays 0.
    """
    solution = [0.0] * len(target)
    for _ in range(_NUM_SWEEPS):
        for index, line in enumerate(matrix):
            if line[index]:
                slope = target[index] - sum(a * x for a, x in zip(line, solution, strict=True))
                solution[index] = max(0.0, solution[index] + slope / line[index])
    return solution
