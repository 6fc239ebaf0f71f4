"""Limits the tokens of a step, so that decoding sequences need not wait long.

A constant budget alone lets one long prompt stop every stream for as long as it takes. A paced step
takes at most `max_itl_ratio` times what its decoding rows would take alone, by the cost model. As
prompts are served one after the other, in their order, and a step that isn't paced would only have
computed more of the same prompts, nothing but the order of arithmetic changes.

Keeping every interval short would make prompts wait, most of all where steps are bound by
arithmetic. So a small share of the intervals between a stream's tokens, below the hundredth that a
99th percentile leaves out, may be longer: it is spent on steps that serve prompts at full speed.

Log-probabilities of a prompt take the whole vocabulary for each of its tokens, maybe several times
what the tokens take themselves. They make no step longer: not a paced one, and one at full speed
computes only as many such tokens as fit into the time of its budget in tokens without them.

The scheduler gets a StepBudget each step; the engine reports how long steps took. Reads no clock.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.errors import ConfigurationError

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

    A sum of parts with non-negative coefficients: a fixed part, a piecewise linear function of the
    step's tokens (its corners are the powers of two: weights are read once for few tokens, and
    products of few rows reach less than those of many), a part per decoding row (vocabulary,
    sampling), one per prompt token whose log-probabilities are asked for, and two for attention:
    token pairs of decoding rows, bound by memory, and of chunks, bound by arithmetic.

        fixed + sum_i slope_i * (tokens of the step between 2^i and 2^(i+1))
            + per_row * decoding rows + per_logprob_token * tokens of prompts
            + per_decode_pair * pairs + per_chunk_pair * pairs

    `runtime.calibration` fits it to steps measured at start-up; from then on it follows what steps
    take, as least mean squares with clipped errors: an outlier moves it by a few percent, a lasting
    change is followed within tens of steps. Reads no clock.

    Invariant: all coefficients are at least 0, so `predict_s` grows with each part of a load.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        """coefficients: as another model's say; to make one from steps, use `fit`."""
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
        projection, in coordinates where each coefficient is 1.
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
            for part, value in zip(parts, values, strict=True)
        ]
        scale = surprise_s / sum(shares)
        for index, part in enumerate(parts):
            if part:
                values[index] = max(0.0, values[index] + scale * shares[index] / part)


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


LEAST_MAX_ITL_RATIO = 1.1

# The margin follows the quantile of steps that take longer than predicted, by steps of this size.
MARGIN_QUANTILE = 0.97
MARGIN_RATE = 0.02
LARGEST_MARGIN = 1.4

# A step is late only for a chunk that is so many times as long as what would fit.
LATE_GAIN = 2
# And only where so many prompts wait: it costs the same however many it serves.
LEAST_LATE_PROMPTS = 2


class StepBudget:
    """The tokens that one step may still compute, beside those of decoding rows.

    Invariant: `load` is what the step computes by now.
    """

    def __init__(self, num_tokens: int, load: StepLoad = NO_LOAD) -> None:
        """load: of the decoding rows."""
        self.num_tokens = num_tokens
        self.load = load

    @property
    def is_spent(self) -> bool:
        """Whether no further chunk may be planned."""
        return self.num_tokens <= 0

    def take(
        self, num_computed_tokens: int, num_wanted: int, *, wants_logprobs: bool = False
    ) -> int:
        """The chunk, at least 1 token, of a sequence that has num_computed_tokens and wants
        num_wanted more; only while not `is_spent`. wants_logprobs: of the prompt's tokens."""
        num_taken = min(num_wanted, self.num_tokens)
        self._count(num_computed_tokens, num_taken, wants_logprobs)
        return num_taken

    def _count(self, num_computed_tokens: int, num_taken: int, wants_logprobs: bool) -> None:
        self.num_tokens -= num_taken
        self.load = self.load.with_chunk(
            num_computed_tokens, num_taken, wants_logprobs=wants_logprobs
        )


class Pacer(Protocol):
    """Gives each step its budget."""

    def open_step(
        self, num_tokens: int, num_decodes: int, num_decode_pairs: int, num_prompts: int = 1
    ) -> StepBudget:
        """The budget of the step that is being planned: at most num_tokens beside num_decodes
        decoding rows, which attend to num_decode_pairs tokens in all. num_prompts: how many
        sequences wait for a part of it."""
        ...

    def launch(self, step_id: int) -> None:
        """The plan that was opened last is sent, as this step."""
        ...

    def observe(self, step_id: int, seconds: float) -> None:
        """A step has ended and took so long. Steps without budget or news are left alone."""
        ...


class ConstantPacer:
    """As many tokens in every step; what steps take is no matter."""

    def open_step(
        self, num_tokens: int, num_decodes: int, num_decode_pairs: int, num_prompts: int = 1
    ) -> StepBudget:
        """See `Pacer`."""
        return StepBudget(num_tokens, StepLoad(num_decodes, num_decode_pairs))

    def launch(self, step_id: int) -> None:
        """See `Pacer`; nothing to remember."""

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`; nothing to learn."""


@dataclass(frozen=True, slots=True)
class PacingConfig:
    """max_itl_ratio: how many times as long as its decoding rows alone a step may take.
    min_prefill_tokens: a step computes at least so many tokens of prompts that wait, however long
    it takes; so every prompt goes on in every step that reaches it.

    late_share: of the intervals between tokens of decoding rows so many may be longer.
    max_late_rows: what is saved up of that at most; half of it is there at the start. A step that
        takes longer costs as many as it has decoding rows.

    2.8 leaves something below 3 for what the model can't predict: rows that join, the loop itself.
    With 0.005 and 128 the 99th percentile over 26,000 intervals or more keeps the ratio.
    """

    max_itl_ratio: float = 2.8
    min_prefill_tokens: int = 8
    late_share: float = 0.005
    max_late_rows: int = 128

    def __post_init__(self) -> None:
        if not self.max_itl_ratio >= LEAST_MAX_ITL_RATIO:
            raise ConfigurationError(
                f"max_itl_ratio is {self.max_itl_ratio}, but must be at least"
                f" {LEAST_MAX_ITL_RATIO}: else no prompt could go on beside running sequences"
            )
        if self.min_prefill_tokens < 1:
            raise ConfigurationError(
                f"min_prefill_tokens is {self.min_prefill_tokens}, but must be at least 1"
            )
        if not 0 <= self.late_share <= 1 or self.max_late_rows < 0:
            raise ConfigurationError(
                f"late_share is {self.late_share} and max_late_rows {self.max_late_rows}, but must"
                " be from 0 to 1, and at least 0"
            )


class PacedBudget(StepBudget):
    """A budget in tokens and in seconds.

    Invariant: unless it `is_late`, the model predicts at most `ratio` times what the decoding rows
    alone take for `load`, or the least of the first chunk takes longer. One that is late takes no
    longer for the log-probabilities of prompts.
    """

    def __init__(
        self, num_tokens: int, load: StepLoad, model: StepCostModel, ratio: float, least: int
    ) -> None:
        """load: of the decoding rows. least: tokens of the first chunk, however long they take."""
        super().__init__(num_tokens, load)
        self.alone_s = 0.0
        self.may_be_late = False
        self.is_late = False
        self._model = model
        self._ratio = ratio
        self._limit_s = 0.0
        self._least = least
        self._is_full = False

    @property
    def is_spent(self) -> bool:
        return self._is_full or self.num_tokens <= 0

    def take(
        self, num_computed_tokens: int, num_wanted: int, *, wants_logprobs: bool = False
    ) -> int:
        most = min(num_wanted, self.num_tokens)
        is_first = not self.load.num_chunk_tokens
        if is_first:
            self.alone_s = self._model.predict_s(self.load)
            self._limit_s = self._ratio * self.alone_s
            if self.is_late:
                self._be_late()
        fitting = self._fitting(num_computed_tokens, most, wants_logprobs)
        if most > LATE_GAIN * fitting and self.may_be_late and not self.is_late:
            self._be_late()
            fitting = self._fitting(num_computed_tokens, most, wants_logprobs)
        num_taken = max(fitting, min(self._least if is_first else 1, most))
        self._count(num_computed_tokens, num_taken, wants_logprobs)
        # The next prompt begins in this step only if that is worth a row of its own.
        self._is_full = num_taken < num_wanted or not self._may_go_on()
        return num_taken

    def _be_late(self) -> None:
        """Compute all tokens of the budget, but no longer than they take without
        log-probabilities."""
        self.is_late = True
        self._limit_s = self._late_s(self.num_tokens)

    def _late_s(self, num_more_tokens: int, num_more_logprobs: int = 0) -> float:
        """How long the step takes with so many tokens more, but for the attention of chunks: what
        that takes is the same with log-probabilities and without."""
        load = self.load
        return self._model.predict_s(
            load._replace(
                num_chunk_tokens=load.num_chunk_tokens + num_more_tokens,
                num_chunk_pairs=0,
                num_logprob_tokens=load.num_logprob_tokens + num_more_logprobs,
            )
        )

    def _fitting(self, num_computed_tokens: int, most: int, wants_logprobs: bool) -> int:
        if self.is_late:
            if not (wants_logprobs or self.load.num_logprob_tokens):
                return most
            return bisect_right(
                range(1, most + 1),
                self._limit_s,
                key=lambda size: self._late_s(size, size * wants_logprobs),
            )
        return self._model.most_tokens(
            self._limit_s, self.load, num_computed_tokens, most, wants_logprobs=wants_logprobs
        )

    def _may_go_on(self) -> bool:
        if self.is_late:
            return not self.load.num_logprob_tokens or self._late_s(self._least) <= self._limit_s
        further = self.load.with_chunk(0, self._least)
        return self._model.predict_s(further) <= self._limit_s


class StepPacer:
    """Budgets by a cost model that follows what steps take.

    Invariant: `margin` is within [1, LARGEST_MARGIN]; about MARGIN_QUANTILE of the steps with
    decodes and prompts take at most `margin` times what was predicted. Steps that are late on
    purpose have no more decoding rows in sum than max_late_rows and late_share of all rows that
    ever decoded, less those of steps that were late against its will.
    """

    def __init__(self, config: PacingConfig, model: StepCostModel) -> None:
        self.config = config
        self.model = model
        self.margin = 1.05
        # That may still be. Half at first: a model that is wrong is late against its will, too.
        self._num_late_rows = config.max_late_rows / 2
        self._open: PacedBudget | None = None
        self._in_flight: dict[int, PacedBudget] = {}

    def open_step(
        self, num_tokens: int, num_decodes: int, num_decode_pairs: int, num_prompts: int = 1
    ) -> StepBudget:
        """See `Pacer`. Where nothing decodes, no stream waits for a token: full speed."""
        load = StepLoad(num_decodes, num_decode_pairs)
        ratio = self.config.max_itl_ratio / self.margin
        least = self.config.min_prefill_tokens
        budget = PacedBudget(num_tokens, load, self.model, ratio, least)
        budget.is_late = not num_decodes
        is_worth_it = num_prompts >= LEAST_LATE_PROMPTS
        budget.may_be_late = is_worth_it and num_decodes <= self._num_late_rows
        self._open = budget
        return budget

    def launch(self, step_id: int) -> None:
        """See `Pacer`."""
        budget, self._open = self._open, None
        if budget is None or not budget.load.num_decodes:
            return
        self._in_flight[step_id] = budget
        change = budget.load.num_decodes * (self.config.late_share - budget.is_late)
        self._num_late_rows = min(self.config.max_late_rows, self._num_late_rows + change)

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`."""
        budget = self._in_flight.pop(step_id, None)
        for earlier in [step for step in self._in_flight if step < step_id]:
            del self._in_flight[earlier]  # they failed
        if budget is None:
            return
        if budget.load.num_chunk_tokens and not budget.is_late:
            is_over = seconds > self.margin * self.model.predict_s(budget.load)
            change = MARGIN_QUANTILE if is_over else MARGIN_QUANTILE - 1
            self.margin = max(1.0, min(LARGEST_MARGIN, self.margin + MARGIN_RATE * change))
            if seconds > self.config.max_itl_ratio * budget.alone_s:  # late against its will
                self._num_late_rows -= budget.load.num_decodes
        self.model.observe(budget.load, seconds)
