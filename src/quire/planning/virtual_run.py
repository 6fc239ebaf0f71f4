"""Serves a load with the real scheduler on a virtual clock.

Nothing is computed. A step takes the time that the costs predict. Each row whose tokens have all
been computed gets a new token. Admission, chunks, pacing, prefix cache and preemption run the code
of a real engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.adapters import BASE_MODEL
from quire.core.kv_groups import KVGroup
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.scheduling.policy import find_policy
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import make_sequences
from quire.core.step import StepPlan, StepResult
from quire.errors import RequestNeverFitsError
from quire.planning.load import LoadRequest
from quire.planning.planned_work import PlannedWork, PlannedWorkCounter

#: The token that every row samples; its value has no effect.
_TOKEN = 7
#: Multiples of this number modulo 1 are spread more evenly than random numbers (Weyl; Knuth, volume
#: 3, 6.4). So the total time of even a few steps is near the expected time.
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The sizes and options of a simulated engine. The fields have the names of engine options."""

    #: The groups of the KV layout.
    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_itl_ratio: float = 0.0
    enable_prefix_caching: bool = True
    num_lookahead_blocks: int = 1
    scheduling_policy: str = "fcfs"
    #: Whether a step is planned while the previous one runs.
    overlap: bool = False


@dataclass(slots=True)
class RunOutcome:
    """The results of a run; all times are in seconds."""

    #: For each served request, the time from its arrival to its first token.
    ttft_s: list[float] = field(default_factory=list)
    #: The times between two tokens of an answer, for all answers.
    itl_s: list[float] = field(default_factory=list)
    #: Number of requests that do not fit into the KV cache even when they run alone.
    num_refused: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    #: The time from the first arrival to the last token.
    duration_s: float = 0.0
    #: The sum of the seconds of all steps.
    busy_s: float = 0.0
    num_steps: int = 0
    #: Length of the longest row, in tokens.
    longest: int = 0
    #: The most rows that were live at once.
    most_rows: int = 0
    #: The most decoding rows in one step.
    most_decodes: int = 0
    #: The most tokens in one step.
    most_tokens: int = 0
    #: The largest `PlannedWork.num_read` of a step.
    most_read: int = 0
    #: Prompt tokens found in the prefix cache.
    hit_tokens: int = 0
    #: Prompt tokens looked up in the prefix cache.
    query_tokens: int = 0
    num_preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole run."""
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Served requests per second of the whole run."""
        return len(self.ttft_s) / self.duration_s if self.duration_s else 0.0

    def note_step(self, work: PlannedWork, seconds: float) -> None:
        """Count a step."""
        load = work.load
        self.num_steps += 1
        self.busy_s += seconds
        self.longest = max(self.longest, work.longest)
        self.most_rows = max(self.most_rows, work.num_rows)
        self.most_decodes = max(self.most_decodes, load.num_decodes)
        self.most_tokens = max(self.most_tokens, load.num_decodes + load.num_chunk_tokens)
        self.most_read = max(self.most_read, work.num_read)


class Costs(Protocol):
    """The costs of steps. `step_costs.StepCosts` implements it with measured costs."""

    def predict_s(self, work: PlannedWork) -> float:
        """The predicted seconds of a step."""
        ...

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        """The ratio of a step's time to the prediction at quantile `place`, 0 <= place < 1."""
        ...

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """The seconds that ending `num_ended` sequences of `num_ended_tokens` tokens adds."""
        ...

    def pacing_model(self) -> StepCostModel:
        """A new model with which a pacer starts."""
        ...


def run_virtually(
    load: Sequence[LoadRequest],
    shape: EngineShape,
    costs: Costs,
    pacer: StepPacer | None = None,
) -> RunOutcome:
    """Simulate serving all requests of `load`, in order of arrival. `pacer` defaults to the result
    of `learned_pacer`.

    Equal arguments give equal outcomes.
    """
    pacer = pacer or learned_pacer(load, shape, costs)
    return _VirtualEngine(load, shape, costs, pacer).run()


def learned_pacer(
    load: Sequence[LoadRequest], shape: EngineShape, costs: Costs
) -> StepPacer | None:
    """A pacer that has learned the step times by serving the load once, as if the engine had served
    such a load for long; None if the shape has no max_itl_ratio."""
    if not shape.max_itl_ratio:
        return None
    pacing = PacingConfig(shape.max_itl_ratio)
    learned = StepPacer(pacing, costs.pacing_model(), num_late_rows=0.0)
    _VirtualEngine(load, shape, costs, learned).run()
    # The load is an excerpt of a long run, so the new pacer's balance of late rows starts at 0.
    pacer = StepPacer(pacing, learned.model, num_late_rows=0.0)
    pacer.margin = learned.margin
    return pacer


class _VirtualEngine:
    """The state of one run.

    Invariant: `_last_s` maps each unfinished answer that has begun to the time of its last token.
    """

    def __init__(
        self,
        load: Sequence[LoadRequest],
        shape: EngineShape,
        costs: Costs,
        pacer: StepPacer | None,
    ) -> None:
        self._shape, self._costs = shape, costs
        self._memory = KVCacheManager(
            KVCacheConfig(
                shape.groups,
                shape.num_blocks,
                shape.block_size,
                shape.enable_prefix_caching,
                secret=b"planning",
            )
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                shape.max_num_seqs, shape.max_num_batched_tokens, shape.num_lookahead_blocks
            ),
            self._memory,
            find_policy(shape.scheduling_policy),
        )
        if pacer is not None:
            self._scheduler.pacer = pacer
        self._work_counter = PlannedWorkCounter(shape.block_size)
        self._arrivals = deque(sorted(load, key=lambda each: each.at_s))
        self._begun_s: dict[str, float] = {}
        self._last_s: dict[tuple[str, int], float] = {}
        self._lengths: dict[str, int] = {}
        # Which quantile of its time the next step takes, for steps with and without prompts.
        self._places = {True: 0.5, False: 0.5}
        self._num_added = 0
        self._in_flight: deque[tuple[int, tuple[int, ...], float, float]] = deque()
        self._now_s = 0.0
        self.outcome = RunOutcome()

    def run(self) -> RunOutcome:
        scheduler, outcome = self._scheduler, self.outcome
        first_s = self._arrivals[0].at_s if self._arrivals else 0.0
        while self._arrivals or scheduler.has_unfinished or self._in_flight:
            self._admit_arrivals()
            plan = scheduler.schedule(self._now_s) if scheduler.has_unfinished else None
            if plan is not None:
                self._launch(plan)
            if len(self._in_flight) > self._shape.overlap or (self._in_flight and plan is None):
                self._finish_step()
            elif plan is None and self._arrivals:
                self._now_s = max(self._now_s, self._arrivals[0].at_s)
        outcome.duration_s = self._now_s - first_s
        outcome.hit_tokens = self._memory.prefixes.num_hit_tokens
        outcome.query_tokens = self._memory.prefixes.num_query_tokens
        outcome.num_preemptions = scheduler.running_set.stats.num_preemptions
        return outcome

    def _admit_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].at_s <= self._now_s:
            self._add(self._arrivals.popleft())

    def _add(self, wanted: LoadRequest) -> None:
        num_prompt, num_output = len(wanted.prompt), wanted.num_output_tokens
        if num_prompt + num_output > self._shape.max_model_len:
            self.outcome.num_refused += 1
            return
        request = Request(
            request_id=str(self._num_added),
            prompt_token_ids=wanted.prompt,
            params=DecodingParams(max_tokens=num_output),
            n=wanted.num_choices,
            cache_domain=wanted.cache_domain,
        )
        self._num_added += 1
        root = self._memory.prefixes.start_chain(wanted.cache_domain, BASE_MODEL)
        (branches,) = make_sequences(request, self._shape.max_model_len, root, self._now_s)
        try:
            self._scheduler.add(branches, self._now_s)
        except RequestNeverFitsError:
            self.outcome.num_refused += 1
            return
        self.outcome.num_prompt_tokens += num_prompt
        self._begun_s[request.request_id] = wanted.at_s
        self._lengths[request.request_id] = num_prompt + num_output

    def _launch(self, plan: StepPlan) -> None:
        work = self._work_counter.count(plan)
        seconds = self._costs.predict_s(work)
        kind = work.load.num_chunk_tokens > 0
        seconds *= self._costs.deviation(work, seconds, self._places[kind])
        self._places[kind] = (self._places[kind] + _GOLDEN) % 1.0
        begins_s = max(self._now_s, self._in_flight[-1][3]) if self._in_flight else self._now_s
        self._in_flight.append((plan.step_id, work.sampled, seconds, begins_s + seconds))
        self.outcome.note_step(work, seconds)

    def _finish_step(self) -> None:
        step_id, sampled, seconds, end_s = self._in_flight.popleft()
        outputs = self._scheduler.apply(
            StepResult(step_id, list(sampled), [(_TOKEN,)] * len(sampled))
        )
        lengths = [
            self._lengths[output.request_id]
            for output in outputs
            if output.finish_reason is not None
        ]
        ending_s = self._costs.ending_s(len(lengths), sum(lengths)) if lengths else 0.0
        self._now_s = max(self._now_s, end_s) + ending_s
        self._scheduler.pacer.observe(step_id, seconds + ending_s)
        outcome, now_s = self.outcome, self._now_s
        outcome.busy_s += ending_s
        for output in outputs:
            answer = output.request_id, output.branch_index
            last_s = self._last_s.get(answer)
            if last_s is not None:
                outcome.itl_s.append(now_s - last_s)
            elif output.request_id in self._begun_s:
                outcome.ttft_s.append(now_s - self._begun_s.pop(output.request_id))
            outcome.num_output_tokens += len(output.token_ids)
            if output.finish_reason is None:
                self._last_s[answer] = now_s
            else:
                self._last_s.pop(answer, None)
