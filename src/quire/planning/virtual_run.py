"""Serves a load with the real engine on a virtual clock.

Nothing is computed. A step takes the time that the costs predict. Each row whose tokens have all
been computed gets a new token. Admission, chunks, pacing, prefix cache, preemption, beams, grammars
and adapters run the code of a real engine; a disk tier loads and stores at measured speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Protocol

from quire.core.adapters import AdapterRef
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.errors import RequestNeverFitsError
from quire.planning.load import LoadRequest
from quire.planning.step_costs import MeasuredBounds
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import ANY_TEXT, EngineShape, VirtualEngine

#: The token that every row samples; its value has no effect.
_TOKEN = 7
#: Multiples of this number modulo 1 are spread more evenly than random numbers (Weyl; Knuth, volume
#: 3, 6.4). So the total time of even a few steps is near the expected time.
_GOLDEN = (5**0.5 - 1) / 2


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
    #: Maximum number of rows that were live at once.
    most_rows: int = 0
    #: Maximum number of decoding rows in one step.
    most_decodes: int = 0
    #: Maximum number of tokens in one step.
    most_tokens: int = 0
    #: The largest `PlannedWork.num_read` of a step.
    most_read: int = 0
    #: Prompt tokens found in the prefix cache.
    hit_tokens: int = 0
    #: Prompt tokens among `hit_tokens` that were loaded from the disk tier.
    loaded_tokens: int = 0
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

    def lacking(self, bounds: MeasuredBounds) -> str | None:
        """See `MeasuredBounds.lacking`."""
        return bounds.lacking(self.most_decodes, self.most_tokens, self.longest, self.most_read)


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
    return _Run(load, shape, costs, pacer).run()


def learned_pacer(
    load: Sequence[LoadRequest], shape: EngineShape, costs: Costs
) -> StepPacer | None:
    """A pacer that has learned the step times by serving the load once, as if the engine had served
    such a load for long; None if the shape has no max_itl_ratio."""
    if not shape.max_itl_ratio:
        return None
    pacing = PacingConfig(shape.max_itl_ratio)
    learned = StepPacer(pacing, costs.pacing_model(), num_late_rows=0.0)
    _Run(load, shape, costs, learned).run()
    # The load is an excerpt of a long run, so the new pacer's balance of late rows starts at 0.
    pacer = StepPacer(pacing, learned.model, num_late_rows=0.0)
    pacer.margin = learned.margin
    return pacer


class _Run:
    """The state of one run; also the costs of its engine.

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
        self._virtual: VirtualEngine[LoadRequest] = VirtualEngine(
            shape, self, pacer=pacer, tokens=repeat(_TOKEN), secret=b"planning"
        )
        self._first_s = min((each.at_s for each in load), default=0.0)
        for each in load:
            self._virtual.expect(each.at_s, each)
        self._begun_s: dict[str, float] = {}
        self._last_s: dict[tuple[str, int], float] = {}
        # Which quantile of its time the next step takes, for steps with and without prompts.
        self._places = {True: 0.5, False: 0.5}
        self._numbers = count()
        self.outcome = RunOutcome()

    def run(self) -> RunOutcome:
        virtual, outcome = self._virtual, self.outcome
        virtual.run(self._add, self._receive)
        outcome.duration_s = virtual.clock.now_s - self._first_s
        outcome.hit_tokens = virtual.memory.prefixes.num_hit_tokens
        outcome.query_tokens = virtual.memory.prefixes.num_query_tokens
        if virtual.memory.moves is not None:
            outcome.loaded_tokens = virtual.memory.moves.loads.stats.num_hit_tokens
        outcome.num_preemptions = virtual.scheduler.running_set.stats.num_preemptions
        return outcome

    def step_s(self, work: PlannedWork) -> float:
        """See `VirtualCosts`."""
        seconds = self._costs.predict_s(work)
        kind = work.load.num_chunk_tokens > 0
        seconds *= self._costs.deviation(work, seconds, self._places[kind])
        self._places[kind] = (self._places[kind] + _GOLDEN) % 1.0
        self.outcome.note_step(work, seconds)
        return seconds

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `VirtualCosts`."""
        seconds = self._costs.ending_s(num_ended, num_ended_tokens)
        self.outcome.busy_s += seconds
        return seconds

    def _add(self, wanted: LoadRequest) -> None:
        num_prompt = len(wanted.prompt)
        if num_prompt + wanted.num_output_tokens > self._shape.max_model_len:
            self.outcome.num_refused += 1
            return
        adapter = wanted.adapter if self._shape.max_loras else ""
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=wanted.prompt,
            params=DecodingParams(
                max_tokens=wanted.num_output_tokens,
                beam_width=wanted.beam_width,
                grammar=ANY_TEXT if wanted.has_grammar else None,
            ),
            n=wanted.beam_width or wanted.num_choices,
            cache_domain=wanted.cache_domain,
            adapter=AdapterRef(adapter, "", adapter) if adapter else None,
        )
        try:
            self._virtual.add(request)
        except RequestNeverFitsError:
            self.outcome.num_refused += 1
            return
        self.outcome.num_prompt_tokens += num_prompt
        self._begun_s[request.request_id] = wanted.at_s

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        outcome, now_s = self.outcome, self._virtual.clock.now_s
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
