"""Limits the tokens of a step, so that decoding sequences get their next tokens in time.

With a constant budget, one long prompt slows down every stream while it is computed. A paced step
takes at most `max_itl_ratio` times the predicted time of its decoding rows alone, and longer only
where that spares prompts many steps. Pacing does not change the order of prompts, which are served
one after the other: a step without pacing would compute more tokens of the same prompts.

Prompts that wait behind the first count as if they decoded already. Otherwise a queue would be
served ever slower: few rows make short steps, short steps small chunks, and small chunks few rows.

If every interval between a stream's tokens were short, prompts would wait long, most of all where
steps are compute-bound. So a small share of the intervals may be longer, below the 1% that a 99th
percentile ignores. These late steps serve prompts at full speed. They are spent where they save
the most: one late step delays each stream once, and saves each waiting prompt the steps that its
tokens would have taken at the pace.

Log-probabilities of a prompt need logits over the whole vocabulary for each token, and may take
several times as long as the tokens themselves. But they make no step longer. A paced step counts
their time. A step at full speed computes fewer tokens with log-probabilities, no more than fit into
the time of its token budget without them.

The scheduler gets a StepBudget for each step; the engine reports how long steps took. Reads no
clock.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quire.core.content_spans import ContentSpan, chunk_within
from quire.core.scheduling.cost_model import NO_LOAD, StepCostModel, StepLoad, typical_model
from quire.errors import ConfigurationError

LEAST_MAX_ITL_RATIO = 1.1

# The margin tracks this quantile of measured / predicted time, changing by at most MARGIN_RATE per
# step.
MARGIN_QUANTILE = 0.97
MARGIN_RATE = 0.02
LARGEST_MARGIN = 1.25

# A late step must compute the prompt tokens of more than this number of steps within the limit.
LATE_GAIN = 2
# A late step that uses up all late intervals must save more than this number of steps, summed over
# the prompts that wait. A step that uses up half of them must save half as many. In simulations
# of Azure's conversations, 200 and 500 gave the same latencies as 80; 40 and 20 gave longer waits.
LATE_PRICE = 80

LEARNS_EVERY_S = 0.01
"""Minimum time of steps that only decode, without drafts, between two from which `LearningPacer`
learns. They are alike, and learning takes 17 us, which is much beside the steps of a tiny model."""


class StepDemand(NamedTuple):
    """The work that waits for a step, from which a `Pacer` computes the step's budget."""

    #: Maximum number of tokens that the step may compute besides those of decoding rows.
    num_tokens: int
    #: Number of rows that decode one token in the step.
    num_decodes: int = 0
    #: Number of tokens that a decoding row's token attends to, summed over the rows.
    num_decode_pairs: int = 0
    #: Number of sequences that wait for a part of the budget and have room to run.
    num_prompts: int = 1
    #: Number of decoding rows that skip this step and wait for its end.
    num_paused: int = 0
    #: Estimated number of tokens that the `num_prompts` sequences lack together.
    num_prompt_tokens: int = 0
    #: Returns the number of tokens that running sequences are expected to generate yet. Called only
    #: if the pacer needs it.
    count_expected: Callable[[], int] = lambda: 0

    @property
    def decode_load(self) -> StepLoad:
        """The work of the decoding rows."""
        return StepLoad(self.num_decodes, self.num_decode_pairs)


class StepBudget:
    """The tokens that one step may still compute, beside those of decoding rows."""

    def __init__(
        self, num_tokens: int, load: StepLoad = NO_LOAD, model: StepCostModel | None = None
    ) -> None:
        """load: the work of the decoding rows. model: predicts what the step takes; None if no
        model is known."""
        self.num_tokens = num_tokens
        #: The work that the step has so far.
        self.load = load
        self.model = model

    @property
    def is_spent(self) -> bool:
        """Whether no further chunk may be planned."""
        return self.num_tokens <= 0

    def take_chunk(
        self,
        num_computed_tokens: int,
        num_wanted: int,
        *,
        wants_logprobs: bool = False,
        spans: Sequence[ContentSpan] = (),
    ) -> int:
        """The length of a sequence's next chunk, at least 1 token; only called while not
        `is_spent`.

        The sequence has num_computed_tokens and wants num_wanted more. wants_logprobs: whether the
        chunk includes log-probabilities of the prompt. spans: the contents of its prompt. If the
        chunk begins with a content that is computed in one step, it has all of it, even if the
        budget is smaller.
        """
        num_taken = chunk_within(spans, num_computed_tokens, min(num_wanted, self.num_tokens))
        self._count(num_computed_tokens, num_taken, wants_logprobs)
        return num_taken

    def take_replay(self, num_computed_tokens: int, num_wanted: int) -> int:
        """Number of tokens, at least 1, that a decoding row may compute in this step to replay its
        accepted drafts. The row lacks num_wanted tokens; `load` already counts one of them."""
        num_more = min(num_wanted - 1, self.num_tokens)
        self.num_tokens -= num_more
        self.load = self.load.with_replay(num_computed_tokens, num_more)
        return 1 + num_more

    def drafts_limit_s(self) -> float:
        """Maximum predicted seconds of a step with drafts. Called when all chunks are
        taken."""
        return math.inf

    def take_drafts(self, num_computed_tokens: int, num_drafts: int) -> None:
        """Count the drafts of a decoding row."""
        self.num_tokens -= num_drafts
        self.load = self.load.with_drafts(num_computed_tokens, num_drafts)

    def predict_s(self) -> float:
        """Predicted seconds of the step as it is planned; 0 if no model is known."""
        return 0.0 if self.model is None else self.model.predict_s(self.load)

    def _count(self, num_computed_tokens: int, num_taken: int, wants_logprobs: bool) -> None:
        self.num_tokens -= num_taken
        self.load = self.load.with_chunk(
            num_computed_tokens, num_taken, wants_logprobs=wants_logprobs
        )


class Pacer(Protocol):
    """Gives each step its budget."""

    def open_step(self, demand: StepDemand) -> StepBudget:
        """The budget of the step that is being planned."""
        ...

    def launch(self, step_id: int) -> None:
        """Record that the step opened last was launched as step_id."""
        ...

    def observe(self, step_id: int, seconds: float) -> None:
        """Learn that a step has ended after `seconds`. Steps without a budget are ignored."""
        ...


class ConstantPacer:
    """Gives every step the same number of tokens, however long steps take."""

    def open_step(self, demand: StepDemand) -> StepBudget:
        """See `Pacer`."""
        return StepBudget(demand.num_tokens, demand.decode_load)

    def launch(self, step_id: int) -> None:
        """See `Pacer`; nothing is remembered."""

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`; nothing is learned."""


class LearningPacer(ConstantPacer):
    """Gives every step the same number of tokens, and learns what steps take.

    Its model begins with the proportions of a typical machine, in the scale of the first step. It
    learns from each step with drafts or chunks, and from one without in each LEARNS_EVERY_S.
    """

    def __init__(self) -> None:
        self.model: StepCostModel | None = None
        self._plain_s = 0.0  # of steps without drafts and chunks since it learned from one
        self._open: StepBudget | None = None
        self._in_flight: dict[int, StepBudget] = {}

    def open_step(self, demand: StepDemand) -> StepBudget:
        """See `Pacer`."""
        self._open = StepBudget(demand.num_tokens, demand.decode_load, self.model)
        return self._open

    def launch(self, step_id: int) -> None:
        """See `Pacer`."""
        assert self._open is not None, "no step was opened"
        self._in_flight[step_id] = self._open

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`."""
        budget = self._in_flight.pop(step_id, None)
        if self._in_flight:
            _drop_earlier(self._in_flight, step_id)
        if budget is None or seconds <= 0:
            return
        if self.model is None:
            self.model = typical_model(budget.load, seconds)
            return
        load = budget.load
        if not (load.num_drafts or load.num_chunk_tokens):
            # Learn from the step behind the one in which the time has passed: that one is likely
            # to be the longest of all, as when another program had the processor.
            is_due = self._plain_s >= LEARNS_EVERY_S
            self._plain_s = seconds if is_due else self._plain_s + seconds
            if not is_due:
                return
        self.model.observe(load, seconds)


def _drop_earlier(in_flight: MutableMapping[int, Any], step_id: int) -> None:
    """Drop the steps before step_id, which failed or whose times are unknown."""
    for earlier in [step for step in in_flight if step < step_id]:
        del in_flight[earlier]


@dataclass(frozen=True, slots=True)
class PacingConfig:
    """Bounds of paced steps.

    A ratio of 2.7 leaves some room below 3 for effects that the model can't predict, such as
    joining rows and the loop itself. With a late_share of 0.006 and 128 late rows, the 99th
    percentile of 32,000 intervals or more stays within the ratio.
    """

    #: Maximum time of a step, relative to its decoding rows alone, while one prompt waits. Of
    #: several prompts, those after the first count as decoding rows.
    max_itl_ratio: float = 2.7
    #: A step computes at least this many tokens of waiting prompts, however long it takes, so that
    #: every prompt it reaches makes progress.
    min_prefill_tokens: int = 8
    #: Share of the intervals between tokens of decoding rows that may be longer than max_itl_ratio
    #: allows.
    late_share: float = 0.006
    #: Largest number of late intervals that can be saved up (or the number of decoding rows, if
    #: larger), and the largest debt of late intervals. At the start, half of it is saved up. A late
    #: step uses up one late interval for each decoding row. It may use up the share of intervals
    #: that running sequences are expected to have yet.
    max_late_rows: int = 128

    def __post_init__(self) -> None:
        if not self.max_itl_ratio >= LEAST_MAX_ITL_RATIO:
            raise ConfigurationError(
                f"max_itl_ratio is {self.max_itl_ratio}, but must be at least"
                f" {LEAST_MAX_ITL_RATIO}: with less, no prompt progresses beside running sequences"
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

    Invariant: unless it `is_late`, the model predicts at most `ratio` * `alone_s` for `load`, or
    the least tokens of the first chunk take longer. Log-probabilities of prompts do not make a late
    step longer.
    """

    def __init__(self, demand: StepDemand, model: StepCostModel, ratio: float, least: int) -> None:
        """`least` tokens of the first chunk are computed, however long they take."""
        super().__init__(demand.num_tokens, demand.decode_load, model)
        #: Number of rows that decode in the step.
        self.num_decodes = demand.num_decodes
        #: Number of decoding rows that wait for the end of the step.
        self.num_streams = demand.num_decodes + demand.num_paused
        #: Predicted time of the decoding rows alone, including prompts that count as such.
        self.alone_s = 0.0
        #: Number of late intervals that are saved up; negative in debt.
        self.num_late_rows = 0.0
        #: The largest debt of late intervals.
        self.max_debt = 0.0
        #: Share of the expected intervals that may be late.
        self.late_share = 0.0
        #: Whether the step serves prompts at full speed.
        self.is_late = False
        #: Whether late intervals were used up for the step when it was launched.
        self.is_paid = False
        self._predict_s = model.predict_s
        self._most_tokens = model.most_tokens
        self._ratio = ratio
        self._limit_s = 0.0
        self._least = least
        self._demand = demand
        # Number of prompts behind the first; they count as decoding rows.
        self._num_behind = max(0, demand.num_prompts - 1)
        self._is_full = False

    @property
    def is_spent(self) -> bool:
        return self._is_full or self.num_tokens <= 0

    @property
    def is_in_time(self) -> bool:
        """Whether the predicted time keeps the ratio. A late step may: cached prompts have less to
        compute than was estimated."""
        return self._predict_s(self.load) <= self._ratio * self.alone_s

    @property
    def num_late_left(self) -> float:
        """Number of late intervals that the step may use up: those that are saved up, and the share
        of those that are expected."""
        num_expected = self._demand.count_expected()
        return self.num_late_rows + min(self.max_debt, self.late_share * num_expected)

    def take_chunk(
        self,
        num_computed_tokens: int,
        num_wanted: int,
        *,
        wants_logprobs: bool = False,
        spans: Sequence[ContentSpan] = (),
    ) -> int:
        most = min(num_wanted, self.num_tokens)
        is_first = not self.load.num_chunk_tokens
        in_time: int | None = None
        # First, set the time limit when the first chunk is planned; be late if that is worth it.
        if is_first:
            self._set_time_limit()
            if not self.is_late:
                # The tokens that wait for the step, of which `in_time` keep the limit.
                num_late = min(max(num_wanted, self._demand.num_prompt_tokens), self.num_tokens)
                in_time = self._most_tokens(self._limit_s, self.load, num_computed_tokens, num_late)
                self.is_late = self._gains_by_lateness(num_late, in_time)
            if self.is_late:
                self._lift_time_limit()
        # Then find the longest chunk within the limit.
        if in_time is None or self.is_late or wants_logprobs:
            fitting = self._fitting(num_computed_tokens, most, wants_logprobs)
        else:
            fitting = min(in_time, most)
        num_taken = max(fitting, min(self._least if is_first else 1, most))
        num_taken = chunk_within(spans, num_computed_tokens, num_taken)
        self._count(num_computed_tokens, num_taken, wants_logprobs)
        # The next prompt begins in this step only if its least chunk fits, too.
        self._is_full = num_taken < num_wanted or not self._may_go_on()
        return num_taken

    def drafts_limit_s(self) -> float:
        """See `StepBudget`. Drafts keep the time limit even if prompts make the step late."""
        if not self.alone_s:
            self._set_time_limit()
        return self._ratio * self.alone_s

    def _set_time_limit(self) -> None:
        """Set the time limit of a step whose load has decoding rows only. Drafts that these compute
        again don't raise the limit.

        Prompts behind the first count as decoding rows with short contexts. So once they decode,
        intervals stay within the ratio for contexts of any length.
        """
        num_decodes = self.num_streams + self._num_behind
        crowd = StepLoad(num_decodes, self.load.num_decode_pairs)
        self.alone_s = self._predict_s(crowd)
        self._limit_s = self._ratio * self.alone_s

    def _gains_by_lateness(self, num_late: int, in_time: int) -> bool:
        """Whether the step should and may be late. It would compute num_late prompt tokens if it
        is late, and in_time of them else."""
        num_steps = num_late / max(in_time, self._least)
        if num_steps <= LATE_GAIN:
            return False
        num_saved = num_steps * (1 + self._num_behind)

        def suffice(num_left: float) -> bool:
            is_worth_it = num_saved * num_left > LATE_PRICE * self.num_streams
            return is_worth_it and self.num_streams <= num_left

        # The expected intervals are counted only if the answer depends on them.
        if suffice(self.num_late_rows):
            return True
        return suffice(self.num_late_rows + self.max_debt) and suffice(self.num_late_left)

    def _lift_time_limit(self) -> None:
        """Lift the time limit: allow all tokens of the budget, but no extra time for
        log-probabilities."""
        self._limit_s = self._late_s(self.num_tokens)

    def _late_s(self, num_more_tokens: int, num_more_logprobs: int = 0) -> float:
        """Predicted time of the step with more tokens, without the attention of chunks.

        The attention takes the same time with log-probabilities and without.
        """
        load = self.load
        return self._predict_s(
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
        return self._most_tokens(
            self._limit_s, self.load, num_computed_tokens, most, wants_logprobs=wants_logprobs
        )

    def _may_go_on(self) -> bool:
        if self.is_late:
            return not self.load.num_logprob_tokens or self._late_s(self._least) <= self._limit_s
        further = self.load.with_chunk(0, self._least)
        return self._predict_s(further) <= self._limit_s


class StepPacer:
    """Budgets by a cost model that follows the measured times of steps.

    Invariant: `margin` is within [1, LARGEST_MARGIN]. Unless it is at its largest, about
    MARGIN_QUANTILE of the steps with decodes and prompts take at most `margin` times the
    prediction.

    The decoding rows of deliberately late steps sum to at most max_late_rows (or the rows of one
    step, if more) plus late_share of all rows that ever decoded or are expected to decode. Steps
    that take longer than predicted don't count. `margin` follows them, and most of them are late
    because other programs had the processor, as a step without prompts would have been.
    """

    def __init__(
        self, config: PacingConfig, model: StepCostModel, num_late_rows: float | None = None
    ) -> None:
        """num_late_rows: late intervals saved up at the start. None: half of max_late_rows, since a
        wrong model causes late steps, too."""
        self.config = config
        self.model = model
        #: Ratio of measured to predicted time that the limits allow for.
        self.margin = 1.05
        # Number of late intervals saved up; negative if steps were late by misprediction.
        self._num_late_rows = config.max_late_rows / 2 if num_late_rows is None else num_late_rows
        self._open: PacedBudget | None = None
        self._in_flight: dict[int, PacedBudget] = {}

    def open_step(self, demand: StepDemand) -> StepBudget:
        """See `Pacer`. If no row decodes, no stream waits for a token, so the step has full
        speed."""
        ratio = self.config.max_itl_ratio / self.margin
        budget = PacedBudget(demand, self.model, ratio, self.config.min_prefill_tokens)
        budget.is_late = not budget.num_streams
        budget.num_late_rows = self._num_late_rows
        budget.max_debt = self.config.max_late_rows
        budget.late_share = self.config.late_share
        self._open = budget
        return budget

    def launch(self, step_id: int) -> None:
        """See `Pacer`."""
        budget, self._open = self._open, None
        if budget is None or not budget.num_streams:
            return
        self._in_flight[step_id] = budget
        saved = self.config.late_share * budget.num_decodes
        budget.is_paid = budget.is_late and not budget.is_in_time
        spent = budget.num_streams if budget.is_paid else 0
        # If there are more rows than max_late_rows, they may save up for one late step.
        most = max(self.config.max_late_rows, budget.num_streams)
        self._num_late_rows = min(most, self._num_late_rows + saved - spent)

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`."""
        budget = self._in_flight.pop(step_id, None)
        _drop_earlier(self._in_flight, step_id)
        if budget is None:
            return
        if budget.load.num_chunk_tokens and not budget.is_paid:
            is_over = seconds > self.margin * self.model.predict_s(budget.load)
            change = MARGIN_QUANTILE if is_over else MARGIN_QUANTILE - 1
            self.margin = max(1.0, min(LARGEST_MARGIN, self.margin + MARGIN_RATE * change))
        self.model.observe(budget.load, seconds)
