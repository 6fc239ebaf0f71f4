"""Remembers recent steps and ended requests, while an operator watches the engine.

Nobody watches until `renew` is called, and again LEASE_S seconds after its last call; until then
nothing is collected. Reads no clock: callers pass engine time. Used by `engine`, read by
`observation`.
"""

from collections import deque
from collections.abc import Sequence as Sequences
from itertools import islice
from typing import Any

from quire.core.sequence import PrefixMiss, Sequence, SequenceState, counted_as
from quire.core.step import HOLE_BLOCK
from quire.engine.request_times import RequestTimes
from quire.observability.step_trace import StepRecord

LEASE_S = 10.0
"""Seconds for which steps are collected after the last question about them."""

MAX_EVENTS = 2048
"""Number of events that are remembered. The oldest are forgotten first."""

QUEUED, PREFILLING, DECODING = "queued", "prefilling", "decoding"
PREEMPTED, ENDED = "preempted", "ended"

Event = dict[str, Any]
"""An event as plain data. Its `event` is "step" or "end"."""


class Totals:
    """Counts since the engine began, whose increase in a step belongs to the step."""

    __slots__ = ("accepted_drafts", "drafts", "evictions", "floor_s")

    def __init__(self, drafts: int, accepted_drafts: int, evictions: int, floor_s: float) -> None:
        self.drafts = drafts
        self.accepted_drafts = accepted_drafts
        #: Number of cached contents that were evicted.
        self.evictions = evictions
        #: Least seconds in which the machine could have computed all steps; 0 if it is unknown.
        self.floor_s = floor_s


class Watch:
    """The last MAX_EVENTS events of one engine.

    Events are numbered without gaps. Invariant: while `is_on` is false, there are no events.
    """

    def __init__(self) -> None:
        #: Whether events are collected. Callers of `on_step` and `on_end` check it first.
        self.is_on = False
        self._until_s = 0.0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._last: Totals | None = None

    def renew(self, now_s: float, totals: Totals) -> None:
        """Collect events for the next LEASE_S seconds."""
        if not self.is_on or now_s > self._until_s:
            self._stop()
            # A new engine process must not repeat the numbers of the process before it, and engine
            # time goes on.
            self._num_events = max(self._num_events, int(1e6 * now_s))
            self._last = totals
        self.is_on, self._until_s = True, now_s + LEASE_S

    def on_step(self, record: StepRecord, totals: Totals, ended_s: float) -> None:
        """Add a step whose result was applied at ended_s."""
        if ended_s > self._until_s:
            self._stop()
            return
        last, self._last = self._last, totals
        assert last is not None, "it is set while events are collected"
        self._add(
            {
                "event": "step",
                "step_id": record.step_id,
                "ended_s": round(ended_s, 6),
                "elapsed_s": round(record.elapsed_s, 6),
                "busy_s": round(record.busy_s, 6),
                "floor_s": round(totals.floor_s - last.floor_s, 6),
                "num_rows": record.num_rows,
                "num_prompt_tokens": record.num_prefill_tokens,
                "num_decode_tokens": record.num_tokens - record.num_prefill_tokens,
                "num_drafts": totals.drafts - last.drafts,
                "num_accepted_drafts": totals.accepted_drafts - last.accepted_drafts,
                "num_waiting": record.num_waiting,
                "num_preemptions": record.num_preemptions,
                "num_evictions": totals.evictions - last.evictions,
                "num_held_blocks": record.num_blocks_used,
            }
        )

    def on_end(self, branches: Sequences[Sequence], times: RequestTimes, ended_s: float) -> None:
        """Add the branches of a request that has ended. times: knows when each began to answer."""
        for branch in branches:
            reason = branch.finish_reason
            first_token_s = times.first_token_s(branch.request_id, branch.branch_index)
            self._add(
                {
                    "event": "end",
                    **describe(branch, first_token_s),
                    "state": ENDED,
                    "ended_s": round(ended_s, 6),
                    "finish_reason": None if reason is None else reason.value,
                }
            )

    def events_after(self, number: int) -> tuple[int, Sequences[Event]]:
        """The number of the last event, and the events after event `number`, oldest first. All that
        are remembered, if `number` is not a number of this engine's events."""
        first = self._num_events - len(self._events)
        skipped = number - first if first <= number <= self._num_events else 0
        return self._num_events, list(islice(self._events, skipped, None))

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._num_events += 1

    def _stop(self) -> None:
        self.is_on = False
        self._events.clear()


def describe(branch: Sequence, first_token_s: float | None) -> dict[str, Any]:
    """A branch of a request as plain data, without its tokens. Times are engine times."""
    return {
        "request_id": branch.request_id,
        "branch": branch.branch_index,
        "tenant": branch.tenant,
        "state": state_of(branch),
        "num_prompt_tokens": branch.num_prompt_tokens,
        "num_output_tokens": branch.num_output_tokens,
        "num_computed_tokens": branch.num_computed_tokens,
        "num_cached_tokens": branch.num_cached_tokens,
        "num_blocks": sum([len(table) - table.count(HOLE_BLOCK) for table in branch.block_tables]),
        "num_preemptions": max(0, branch.num_admissions - 1),
        "arrival_s": round(branch.arrival_s, 6),
        "first_scheduled_s": _rounded(branch.first_scheduled_s),
        "first_token_s": _rounded(first_token_s),
        "miss": None if branch.miss is None else _miss(branch.miss),
    }


def state_of(branch: Sequence) -> str:
    """QUEUED, PREFILLING, DECODING or PREEMPTED; a finished branch counts as decoding."""
    if branch.state is SequenceState.WAITING:
        return QUEUED
    if branch.state is SequenceState.PREEMPTED:
        return PREEMPTED
    return DECODING if branch.num_output_tokens else PREFILLING


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 6)


def _miss(miss: PrefixMiss) -> dict[str, Any]:
    """Why the cache had no more of a prompt, without tokens and without other cache domains."""
    return {
        "reason": counted_as(miss.reason).value,
        "num_found_tokens": miss.num_found_tokens,
        "evicted_s": None if miss.eviction is None else round(miss.eviction.at_s, 6),
        "evicted_by": None if miss.eviction is None else miss.eviction.by_request_id,
    }
