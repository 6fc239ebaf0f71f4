"""Replays a trace against a simulated engine: the real scheduler and memory on a virtual clock.

No model runs: each step takes the time that `quire plan --measure` measured on this machine.
Answers have their recorded lengths, and no two generated tokens are equal. The API server is not
simulated, so the figures do not include its time for HTTP and tokenizing.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from quire.core.adapters import BASE_MODEL
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.scheduling.policy import find_policy
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence, make_sequences
from quire.core.step import StepPlan, StepResult
from quire.errors import RequestNeverFitsError
from quire.planning.planned_work import PlannedWorkCounter
from quire.planning.step_costs import MeasuredBounds
from quire.planning.virtual_run import Costs, EngineShape
from quire.replay.figures import ReplayFigures, Reply
from quire.replay.script import Due, ModelBounds, ReplayScript
from quire.traces.trace import Trace

#: Token ids of prompts are below this number. Each sampled token is a new id at or above it, so
#: that no two tokens are equal by chance. All ids fit into the prefix cache's 32 bits.
_VOCABULARY = 1 << 31

OVERLOADED, NEVER_FITS = "429 overloaded", "422 request_never_fits"


@dataclass(slots=True)
class _OpenReplay:
    """A request of the replay that has not ended."""

    due: Due
    prompt: list[int]
    branches: list[Sequence]
    reply: Reply
    #: Number of the request's answers that have not ended.
    num_left: int
    #: Token ids of the first answer so far.
    output: list[int]
    #: The time of the first answer's latest token, in seconds of the virtual clock.
    last_s: float = 0.0
    #: The time at which the client disconnects; None if it does not disconnect at a fixed time.
    leaves_s: float | None = None
    #: Number of tokens of the first answer after which the client disconnects; None if it stays.
    leaves_after: int | None = None


class _InFlight(NamedTuple):
    plan: StepPlan
    sampled: tuple[int, ...]
    seconds: float
    end_s: float


def replay_in_simulation(
    trace: Trace,
    shape: EngineShape,
    costs: Costs,
    *,
    bounds: MeasuredBounds | None = None,
    max_queued_requests: int,
    is_closed: bool = True,
) -> ReplayFigures:
    """Replay the whole trace. Equal arguments give equal figures.

    `bounds` are the largest steps that were measured for the costs; None if there are no bounds. A
    request is refused if it would raise the number of unfinished answers above max_queued_requests,
    as in the server.
    """
    model = ModelBounds(_VOCABULARY, shape.max_model_len)
    script = ReplayScript(trace, model, is_closed=is_closed)
    replay = _SimulatedReplay(script, shape, costs, max_queued_requests)
    return ReplayFigures(trace, replay.run(), script.left_out, replay.notes(bounds))


class _SimulatedReplay:
    """One replay in a simulation.

    Invariant: a request that became due is in `_coming`, in `_open`, or has its reply in
    `_replies`.
    """

    def __init__(
        self, script: ReplayScript, shape: EngineShape, costs: Costs, max_num_open: int
    ) -> None:
        self._script, self._shape, self._costs = script, shape, costs
        self._max_num_open = max_num_open
        self._memory = KVCacheManager(
            KVCacheConfig(
                shape.groups,
                shape.num_blocks,
                shape.block_size,
                shape.enable_prefix_caching,
                secret=b"replay",
            )
        )
        config = SchedulerConfig(
            shape.max_num_seqs, shape.max_num_batched_tokens, shape.num_lookahead_blocks
        )
        self._scheduler = Scheduler(config, self._memory, find_policy(shape.scheduling_policy))
        if shape.max_itl_ratio:
            pacing = PacingConfig(shape.max_itl_ratio)
            self._scheduler.pacer = StepPacer(pacing, costs.pacing_model())
        self._work_counter = PlannedWorkCounter(shape.block_size)
        self._coming = [(due.at_s, due.number) for due in script.first]
        heapq.heapify(self._coming)
        self._open: dict[str, _OpenReplay] = {}
        self._replies: list[Reply] = []
        self._in_flight: deque[_InFlight] = deque()
        self._tokens = (_VOCABULARY + number % _VOCABULARY for number in count())
        self._now_s = 0.0
        self._num_open = 0
        self._changed: Counter[str] = Counter()
        self._most_rows = self._most_tokens = self._longest = self._most_read = 0

    def run(self) -> list[Reply]:
        scheduler, overlap = self._scheduler, self._shape.overlap
        while self._coming or scheduler.has_unfinished or self._in_flight:
            self._admit_arrivals()
            plan = scheduler.schedule(self._now_s) if scheduler.has_unfinished else None
            if plan is not None:
                self._launch(plan)
            if len(self._in_flight) > overlap or (self._in_flight and plan is None):
                self._finish_step()
            elif plan is None and self._coming:  # idle until the next arrival
                self._now_s = max(self._now_s, self._coming[0][0])
            self._abort_abandoned()
        return sorted(self._replies, key=lambda reply: reply.at_s)

    def notes(self, bounds: MeasuredBounds | None) -> list[str]:
        """Sentences that say how the replay differed from the trace, and which steps exceeded
        `bounds`."""
        notes = [f"{number} {what}" for what, number in self._changed.items()]
        if bounds is None:
            return notes
        lacking = bounds.lacking(self._most_rows, self._most_tokens, self._longest, self._most_read)
        if lacking is not None:
            notes.append(f"the times are unreliable; steps exceeded the measured ones: {lacking}")
        return notes

    def _admit_arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self._now_s:
            at_s, number = heapq.heappop(self._coming)
            self._add(Due(at_s, number))

    def _add(self, due: Due) -> None:
        traced = self._script.trace.requests[due.number]
        options, prompt = traced.options, self._script.prompt(due.number)
        num_choices = options.beam_width or options.num_choices
        num_output = self._script.num_output_tokens(due.number)
        goes = traced.end == "disconnect"
        if goes:  # the answer must be longer than what the client received
            room = self._shape.max_model_len - len(prompt)
            num_output = min(max(num_output, options.max_tokens or 0), room)
        self._count_change(options.has_grammar, "requests had a grammar, which is not simulated")
        self._count_change(options.adapter, "requests named an adapter, and ran on the base model")
        self._count_change(
            options.beam_width, "requests used beam search, and were sampled instead"
        )
        request = Request(
            str(due.number),
            prompt,
            DecodingParams(max_tokens=num_output),
            num_choices,
            tenant=f"tenant-{traced.tenant}",
        )
        reply = Reply(due.number, due.at_s, due.at_s)
        if self._num_open + num_choices > self._max_num_open:
            self._refuse(due, reply, OVERLOADED)
            return
        root = self._memory.prefixes.start_chain("", BASE_MODEL)
        (branches,) = make_sequences(request, self._shape.max_model_len, root, self._now_s)
        try:
            self._scheduler.add(branches, self._now_s)
        except RequestNeverFitsError:
            self._refuse(due, reply, NEVER_FITS)
            return
        self._num_open += num_choices
        opened = _OpenReplay(due, prompt, branches, reply, num_choices, [])
        if goes:
            opened.leaves_after = traced.num_output_tokens or 1
            if not traced.num_output_tokens:
                opened.leaves_s = due.at_s + (traced.took_s or 0.0)
        self._open[request.request_id] = opened

    def _launch(self, plan: StepPlan) -> None:
        work = self._work_counter.count(plan)
        seconds = self._costs.predict_s(work)
        self._most_rows = max(self._most_rows, work.load.num_decodes)
        self._most_tokens = max(self._most_tokens, plan.num_tokens)
        self._longest = max(self._longest, work.longest)
        self._most_read = max(self._most_read, work.num_read)
        begins_s = max(self._now_s, self._in_flight[-1].end_s) if self._in_flight else self._now_s
        self._in_flight.append(_InFlight(plan, work.sampled, seconds, begins_s + seconds))

    def _finish_step(self) -> None:
        step = self._in_flight.popleft()
        tokens = [(next(self._tokens),) for _ in step.sampled]
        outputs = self._scheduler.apply(StepResult(step.plan.step_id, list(step.sampled), tokens))
        ended = [each for each in outputs if each.finish_reason is not None]
        lengths = [
            len(self._open[each.request_id].prompt) + len(self._open[each.request_id].output)
            for each in ended
        ]
        ending_s = self._costs.ending_s(len(lengths), sum(lengths)) if lengths else 0.0
        self._now_s = max(self._now_s, step.end_s) + ending_s
        self._scheduler.pacer.observe(step.plan.step_id, step.seconds + ending_s)
        for output in outputs:
            self._receive(output)

    def _receive(self, output: SequenceOutput) -> None:
        opened, now_s = self._open[output.request_id], self._now_s
        reply = opened.reply
        reply.num_output_tokens += len(output.token_ids)
        if output.branch_index == 0:
            opened.output += output.token_ids
            if reply.first_s is not None:
                reply.gaps_s.append(now_s - opened.last_s)
            opened.last_s = now_s
        if reply.first_s is None:
            reply.first_s = now_s
            reply.num_prompt_tokens = len(opened.prompt)
            reply.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            opened.num_left -= 1
            self._num_open -= 1
            if not opened.num_left:
                self._end(output.request_id)

    def _abort_abandoned(self) -> None:
        """Abort the requests whose clients disconnected at this point in the trace."""
        for request_id, opened in list(self._open.items()):
            has_enough = (
                opened.leaves_after is not None and len(opened.output) >= opened.leaves_after
            )
            is_late = opened.leaves_s is not None and opened.leaves_s <= self._now_s
            if has_enough or is_late:
                for branch in opened.branches:
                    if not branch.is_finished:
                        self._scheduler.abort(branch)
                        self._num_open -= 1
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        opened = self._open.pop(request_id)
        opened.reply.end_s = self._now_s
        self._close(opened.due, opened.reply, opened.prompt, opened.output)

    def _refuse(self, due: Due, reply: Reply, reason: str) -> None:
        reply.refused, reply.end_s = reason, self._now_s
        self._close(due, reply, [], [])

    def _close(self, due: Due, reply: Reply, prompt: list[int], output: list[int]) -> None:
        self._replies.append(reply)
        for following in self._script.end(due.number, self._now_s, prompt, output):
            heapq.heappush(self._coming, (following.at_s, following.number))

    def _count_change(self, is_so: object, what: str) -> None:
        if is_so:
            self._changed[what] += 1
