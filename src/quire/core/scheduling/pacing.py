"""Limits the tokens of a step, so that decoding sequences need not wait long.

A constant budget alone lets one long prompt stop every stream for as long as it takes. A paced step
takes at most `max_itl_ratio` times what its decoding rows would take alone, by the cost model; more
only where several prompts wait. As prompts are served one after the other, in their order, and a
step that isn't paced would only have computed more of the same prompts, nothing but the order of
arithmetic changes.

Prompts that wait behind the first count as if they decoded already. Else a queue would be served
ever slower: few rows make short steps, short steps small chunks, and small chunks few rows.

Keeping every interval short would make prompts wait, most of all where steps are bound by
arithmetic. So a small share of the intervals between a stream's tokens, below the hundredth that a
99th percentile leaves out, may be longer: it is spent on steps that serve prompts at full speed.

Log-probabilities of a prompt take the whole vocabulary for each of its tokens, maybe several times
what the tokens take themselves. They make no step longer: not a paced one, and one at full speed
computes only as many such tokens as fit into the time of its budget in tokens without them.

The scheduler gets a StepBudget each step; the engine reports how long steps took. Reads no clock.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from quire.core.scheduling.cost_model import NO_LOAD, StepCostModel, StepLoad
from quire.errors import ConfigurationError

LEAST_MAX_ITL_RATIO = 1.1

# The margin follows the quantile of steps that take longer than predicted, by steps of this size.
MARGIN_QUANTILE = 0.97
MARGIN_RATE = 0.02
LARGEST_MARGIN = 1.25

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
        self,
        num_tokens: int,
        num_decodes: int,
        num_decode_pairs: int,
        num_prompts: int = 1,
        num_paused: int = 0,
    ) -> StepBudget:
        """The budget of the step that is being planned: at most num_tokens beside num_decodes
        decoding rows, which attend to num_decode_pairs tokens in all. num_prompts: how many
        sequences wait for a part of it and have room to run. num_paused: rows that decode in other
        steps, but not in this one."""
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
        self,
        num_tokens: int,
        num_decodes: int,
        num_decode_pairs: int,
        num_prompts: int = 1,
        num_paused: int = 0,
    ) -> StepBudget:
        """See `Pacer`."""
        return StepBudget(num_tokens, StepLoad(num_decodes, num_decode_pairs))

    def launch(self, step_id: int) -> None:
        """See `Pacer`; nothing to remember."""

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`; nothing to learn."""


@dataclass(frozen=True, slots=True)
class PacingConfig:
    """max_itl_ratio: how many times as long as its decoding rows alone a step may take, where one
        prompt waits; of more, those behind the first count as decoding rows.
    min_prefill_tokens: a step computes at least so many tokens of prompts that wait, however long
    it takes; so every prompt goes on in every step that reaches it.

    late_share: of the intervals between tokens of decoding rows so many may be longer.
    max_late_rows: what is saved up of that at most, or the rows that decode where these are more;
        and what is owed at most; half of it is there at the start. A step that takes longer costs
        as many as there are decoding rows.

    2.7 leaves something below 3 for what the model can't predict: rows that join, the loop itself.
    With 0.005 and 128 the 99th percentile over 26,000 intervals or more keeps the ratio.
    """

    max_itl_ratio: float = 2.7
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

    Invariant: unless it `is_late`, the model predicts at most `ratio` times `alone_s`, what the
    decoding rows and those that will be take alone, for `load`; or the least of the first chunk
    takes longer. One that is late takes no longer for the log-probabilities of prompts.
    """

    def __init__(
        self,
        num_tokens: int,
        load: StepLoad,
        model: StepCostModel,
        ratio: float,
        least: int,
        num_behind: int = 0,
        num_paused: int = 0,
    ) -> None:
        """load: of the decoding rows. least: tokens of the first chunk, however long they take.
        num_behind: prompts that wait behind the first and count as decoding rows. num_paused: rows
        that decode in other steps, and wait for the end of this one."""
        super().__init__(num_tokens, load)
        self.num_streams = load.num_decodes + num_paused
        self.alone_s = 0.0
        self.may_be_late = False
        self.is_late = False
        self._model = model
        self._ratio = ratio
        self._limit_s = 0.0
        self._least = least
        self._num_behind = num_behind
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
            # Short contexts are assumed for those behind: an interval is then no longer than the
            # ratio allows once they decode, whatever they attend to.
            crowd = self.load._replace(num_decodes=self.num_streams + self._num_behind)
            self.alone_s = self._model.predict_s(crowd)
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
    decodes and prompts take at most `margin` times what was predicted, unless it is at its largest.
    Steps that are late on purpose have no more decoding rows in sum than max_late_rows (or, where
    these are more, the rows of a step) and late_share of all rows that ever decoded, less those of
    steps that were late against its will; of these, at most max_late_rows are owed.
    """

    def __init__(
        self, config: PacingConfig, model: StepCostModel, num_late_rows: float | None = None
    ) -> None:
        """num_late_rows: what is saved up at the start; None: half of what may be. A model that is
        wrong is late against its will, too."""
        self.config = config
        self.model = model
        self.margin = 1.05
        # That may still be.
        self._num_late_rows = config.max_late_rows / 2 if num_late_rows is None else num_late_rows
        self._open: PacedBudget | None = None
        self._in_flight: dict[int, PacedBudget] = {}

    def open_step(
        self,
        num_tokens: int,
        num_decodes: int,
        num_decode_pairs: int,
        num_prompts: int = 1,
        num_paused: int = 0,
    ) -> StepBudget:
        """See `Pacer`. Where nothing decodes, no stream waits for a token: full speed."""
        load = StepLoad(num_decodes, num_decode_pairs)
        ratio = self.config.max_itl_ratio / self.margin
        least = self.config.min_prefill_tokens
        num_behind = max(0, num_prompts - 1)
        budget = PacedBudget(num_tokens, load, self.model, ratio, least, num_behind, num_paused)
        budget.is_late = not budget.num_streams
        is_worth_it = num_prompts >= LEAST_LATE_PROMPTS
        budget.may_be_late = is_worth_it and budget.num_streams <= self._num_late_rows
        self._open = budget
        return budget

    def launch(self, step_id: int) -> None:
        """See `Pacer`."""
        budget, self._open = self._open, None
        if budget is None or not budget.num_streams:
            return
        self._in_flight[step_id] = budget
        saved = self.config.late_share * budget.load.num_decodes
        spent = budget.num_streams if budget.is_late else 0
        # More rows than max_late_rows save up for one late step, too: else none ever came.
        most = max(self.config.max_late_rows, budget.num_streams)
        self._num_late_rows = min(most, self._num_late_rows + saved - spent)

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
                owed = self._num_late_rows - budget.num_streams
                self._num_late_rows = max(-self.config.max_late_rows, owed)
        self.model.observe(budget.load, seconds)
