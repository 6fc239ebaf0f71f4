"""Measures the contents of the slots of the KV cache, step by step.

A slot is room for one token. Every slot is counted once, as in the ledger
(`core.memory.memory_report`), where contiguous reservations are split by what will come of them:

    useful    holds keys and values of a token of an unfinished sequence
    reserved  set aside for tokens that its owner will still make
    unfilled  the rest of a last, partly filled block (paging alone)
    internal  set aside, but its owner will never use it: reserved beyond its end, or rounded up
    external  free, and enough in all for the first waiting one, but not in one run
    cached    free, and still holds a prefix that another request may find
    free      neither

Reads the scheduler between its steps. Used by `study`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.bench.baselines.contiguous import ContiguousKVCacheManager
from quire.core.memory.memory_report import memory_report
from quire.core.request import SequenceOutput
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence

PARTS = ("useful", "reserved", "unfilled", "internal", "external", "cached", "free")
HELD_PARTS = PARTS[:4]
WARM_UP_SHARE = 0.1


def count_slots(scheduler: Scheduler) -> dict[str, int]:
    """Part -> slots, over all KV groups; they add up to the whole pool."""
    memory = scheduler.memory
    live = [*scheduler.running, *scheduler.waiting]
    report = memory_report(memory, live)
    assert report.in_flight_bytes == 0, "a step is in flight"
    slots_per_byte = memory.block_size / memory.config.groups[0].bytes_per_block
    slots = dict.fromkeys(PARTS, 0)
    for part, num_bytes in report.parts.items():
        if part in slots:
            slots[part] = round(num_bytes * slots_per_byte)
    if isinstance(memory, ContiguousKVCacheManager):
        _split_reservations(slots, memory, live, next(iter(scheduler.waiting), None))
    return slots


def _split_reservations(
    slots: dict[str, int],
    memory: ContiguousKVCacheManager,
    live: Iterable[Sequence],
    first_waiting: Sequence | None,
) -> None:
    """Split what will be used from what will not, by the true lengths; and find holes."""
    # The last token is sampled, but its K and V are never written.
    num_left = sum(
        sequence.max_num_tokens - 1 - sequence.num_computed_tokens
        for sequence in live
        if sequence.block_tables
    )
    num_unused = slots["unfilled"] + slots["reserved"]
    slots["unfilled"], slots["reserved"] = 0, num_left * memory.num_groups
    slots["internal"] = num_unused - slots["reserved"]
    if first_waiting is not None and memory.is_fragmented_for(first_waiting):
        slots["external"], slots["free"] = slots["free"], 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Averages over time, each step weighted with its duration.

    They are taken from when a tenth of the requests has ended until no request waits or is
    still to come; over the whole run where there is no such time (is_steady is False).

    shares: part -> share of all slots. useful_share: useful slots by those held (free, cached and
    fragmented ones are not). mean_running: requests in a batch; most_running: in the whole run.
    output_tokens_per_s and requests_per_s: made and ended within the time.
    """

    shares: dict[str, float]
    useful_share: float
    mean_running: float
    most_running: int
    output_tokens_per_s: float
    requests_per_s: float
    measured_s: float
    is_steady: bool


class MemoryMeter:
    """Takes one note a step."""

    def __init__(self, num_requests: int, ledger_interval: int = 1) -> None:
        """ledger_interval: steps from one look at all slots to the next; each look stands for the
        steps that follow, up to the next."""
        self._num_requests = num_requests
        self._ledger_interval = ledger_interval
        self._slots: dict[str, int] = {}
        self._notes: list[tuple[float, ...]] = []
        self._is_steady: list[bool] = []
        self._num_ended = 0

    def observe(
        self,
        scheduler: Scheduler,
        outputs: Iterable[SequenceOutput],
        seconds: float,
        num_to_come: int,
    ) -> None:
        """Count a step that took `seconds`, and the state after it.

        A sequence that ended with the step counts as running, but its slots are free.
        num_to_come: requests that have not arrived yet.
        """
        outputs = list(outputs)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        num_ended = sum(output.finish_reason is not None for output in outputs)
        num_running = len(scheduler.running) + num_ended
        if len(self._notes) % self._ledger_interval == 0:
            self._slots = count_slots(scheduler)
        self._notes.append((seconds, num_running, num_tokens, num_ended, *self._slots.values()))
        is_warm = self._num_ended >= WARM_UP_SHARE * self._num_requests
        self._is_steady.append(is_warm and bool(num_to_come or len(scheduler.waiting)))
        self._num_ended += num_ended

    def use(self) -> MemoryUse:
        """The averages, at the end of the run."""
        notes = np.array(self._notes)
        is_steady = np.array(self._is_steady)
        chosen = notes[is_steady] if is_steady.any() else notes
        seconds, running, tokens, ended = chosen[:, :4].T
        measured_s = float(seconds.sum())
        means = seconds @ chosen[:, 4:] / measured_s
        slots = dict(zip(PARTS, means.tolist(), strict=True))
        num_held = sum(slots[part] for part in HELD_PARTS)
        return MemoryUse(
            shares={part: count / float(means.sum()) for part, count in slots.items()},
            useful_share=slots["useful"] / num_held if num_held else 0.0,
            mean_running=float(seconds @ running) / measured_s,
            most_running=int(notes[:, 1].max()),
            output_tokens_per_s=float(tokens.sum()) / measured_s,
            requests_per_s=float(ended.sum()) / measured_s,
            measured_s=measured_s,
            is_steady=bool(is_steady.any()),
        )
