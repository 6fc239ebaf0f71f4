"""Replays a trace against a simulated engine: the real engine on a virtual clock.

No model runs: each step takes the time that `quire plan --measure` measured on this machine.
Answers have their recorded lengths, and no two generated tokens are equal. Beam searches, grammars
and adapters run as in the engine, but what they add to a step's time was not measured. The API
server is not simulated, so the figures do not include its time for HTTP and tokenizing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.adapters import AdapterRef
from quire.core.content_spans import ContentSpan
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.errors import RequestNeverFitsError
from quire.planning.step_costs import MeasuredBounds
from quire.planning.virtual_run import Costs, RunOutcome
from quire.replay.figures import ReplayFigures, Reply
from quire.replay.script import Due, ModelBounds, ReplayScript
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import ANY_TEXT, FIRST_NEW_TOKEN, EngineShape, VirtualEngine
from quire.traces.trace import Trace, TraceOptions

OVERLOADED, NEVER_FITS = "429 overloaded", "422 request_never_fits"


@dataclass(slots=True)
class _OpenReplay:
    """A request of the replay that has not ended."""

    due: Due
    prompt: list[int]
    reply: Reply
    #: Number of the request's answers that have not ended.
    num_left: int
    #: Token ids of the first answer so far.
    output: list[int]
    #: The time of the first answer's latest token, in seconds of the virtual clock.
    last_s: float = 0.0
    #: The time at which the client disconnects; None if it does not disconnect at a fixed time.
    leaves_s: float | None = None
    #: The client disconnects after this number of tokens of the first answer; None if it stays.
    leaves_after: int | None = None


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
    model = ModelBounds(FIRST_NEW_TOKEN, shape.max_model_len)
    script = ReplayScript(trace, model, is_closed=is_closed)
    replay = _SimulatedReplay(script, shape, costs, max_queued_requests)
    return ReplayFigures(trace, replay.run(), script.left_out, replay.notes(bounds))


class _SimulatedReplay:
    """One replay in a simulation; also the costs of its engine.

    Invariant: a request that became due will arrive, is in `_open`, or has its reply in `_replies`.
    """

    def __init__(
        self, script: ReplayScript, shape: EngineShape, costs: Costs, max_num_open: int
    ) -> None:
        self._script, self._shape, self._costs = script, shape, costs
        self._max_num_open = max_num_open
        pacer = None
        if shape.max_itl_ratio:
            pacer = StepPacer(PacingConfig(shape.max_itl_ratio), costs.pacing_model())
        self._virtual: VirtualEngine[Due] = VirtualEngine(
            shape, self, pacer=pacer, secret=b"replay"
        )
        for due in script.first:
            self._virtual.expect(due.at_s, due)
        self._open: dict[str, _OpenReplay] = {}
        self._replies: list[Reply] = []
        self._num_open = 0
        self._notes: Counter[str] = Counter()
        self._steps = RunOutcome()

    def run(self) -> list[Reply]:
        self._virtual.run(self._add, self._receive_all)
        return sorted(self._replies, key=lambda reply: reply.at_s)

    def notes(self, bounds: MeasuredBounds | None) -> list[str]:
        """Sentences that say how the replay differed from the trace, and which steps exceeded
        `bounds`."""
        notes = [f"{number} {what}" for what, number in self._notes.items()]
        moves = self._virtual.memory.moves
        if moves is not None:
            notes.append(
                f"{moves.loads.stats.num_hit_tokens} prompt tokens were loaded from the disk tier,"
                " which began empty"
            )
        if bounds is None:
            return notes
        lacking = self._steps.lacking(bounds)
        if lacking is not None:
            notes.append(f"the times are unreliable; steps exceeded the measured ones: {lacking}")
        return notes

    def step_s(self, work: PlannedWork) -> float:
        """See `VirtualCosts`."""
        seconds = self._costs.predict_s(work)
        self._steps.note_step(work, seconds)
        return seconds

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `VirtualCosts`."""
        return self._costs.ending_s(num_ended, num_ended_tokens)

    def _add(self, due: Due) -> None:
        traced = self._script.trace.requests[due.number]
        options, prompt = traced.options, self._script.prompt(due.number)
        num_choices = options.beam_width or options.num_choices
        num_output = self._script.num_output_tokens(due.number)
        goes = traced.end == "disconnect"
        if goes:  # the answer must be longer than what the client received
            room = self._shape.max_model_len - len(prompt)
            num_output = min(max(num_output, options.max_tokens or 0), room)
        has_grammar = options.has_grammar and not options.beam_width  # a beam search obeys none
        adapter = str(options.adapter) if options.adapter and self._shape.max_loras else ""
        self._note(options, has_grammar)
        grammar = ANY_TEXT if has_grammar else None
        request = Request(
            str(due.number),
            prompt,
            DecodingParams(num_output, beam_width=options.beam_width, grammar=grammar),
            num_choices,
            tenant=f"tenant-{traced.tenant}",
            content_spans=self._spans(traced.contents, prompt),
            adapter=AdapterRef(adapter, "", adapter) if adapter else None,
        )
        reply = Reply(due.number, due.at_s, due.at_s)
        if self._num_open + num_choices > self._max_num_open:
            self._refuse(due, reply, OVERLOADED)
            return
        try:
            self._virtual.add(request)
        except RequestNeverFitsError:
            self._refuse(due, reply, NEVER_FITS)
            return
        self._num_open += num_choices
        opened = _OpenReplay(due, prompt, reply, num_choices, [])
        if goes:
            opened.leaves_after = traced.num_output_tokens or 1
            if not traced.num_output_tokens:
                opened.leaves_s = due.at_s + (traced.took_s or 0.0)
        self._open[request.request_id] = opened

    def _spans(
        self, contents: Sequence[tuple[int, int]], prompt: Sequence[int]
    ) -> tuple[ContentSpan, ...]:
        """The contents that one step computes whole; none for models whose contents are computed
        like text. Equal tokens of the replayed prompts stand for equal contents."""
        if not self._shape.reads_contents_whole:
            return ()
        found = []
        for first, count in contents:
            tokens = repr(prompt[first : first + count]).encode()
            digest = hashlib.blake2b(tokens, digest_size=16).hexdigest()
            found.append(ContentSpan(first, count, digest, in_one_step=True))
        return tuple(found)

    def _note(self, options: TraceOptions, has_grammar: bool) -> None:
        """Count the features of a request that the recording or the costs don't cover."""
        if has_grammar:
            self._notes[
                "requests had a grammar; the recording does not say which, so that compiling it and"
                " its masks take no time"
            ] += 1
        if options.adapter and self._shape.max_loras:
            self._notes[
                "requests named an adapter; steps take the times of the base model, and no adapter"
                " is read from a disk"
            ] += 1
        elif options.adapter:
            self._notes[
                "requests named an adapter, and ran on the base model; enable_lora simulates them"
            ] += 1
        if options.beam_width:
            self._notes[
                "requests used beam search; which beams went on was not recorded, and is drawn"
            ] += 1

    def _receive_all(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._receive(output)
        self._abort_abandoned()

    def _receive(self, output: SequenceOutput) -> None:
        opened, now_s = self._open[output.request_id], self._virtual.clock.now_s
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
            is_late = opened.leaves_s is not None and opened.leaves_s <= self._virtual.clock.now_s
            if has_enough or is_late:
                self._virtual.engine.abort(request_id)
                self._num_open -= opened.num_left
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        opened = self._open.pop(request_id)
        opened.reply.end_s = self._virtual.clock.now_s
        self._close(opened.due, opened.reply, opened.prompt, opened.output)

    def _refuse(self, due: Due, reply: Reply, reason: str) -> None:
        reply.refused, reply.end_s = reason, self._virtual.clock.now_s
        self._close(due, reply, [], [])

    def _close(self, due: Due, reply: Reply, prompt: list[int], output: list[int]) -> None:
        self._replies.append(reply)
        for following in self._script.end(due.number, self._virtual.clock.now_s, prompt, output):
            self._virtual.expect(following.at_s, following)
