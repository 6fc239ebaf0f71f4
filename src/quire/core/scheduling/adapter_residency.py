"""Slots of LoRA adapters in device memory, and the sequences that wait for one.

The memory has a fixed number of slots. A sequence is admitted once its adapter has a slot and is
loaded, or is ready to be loaded by the coming plan. While an adapter is being read, other sequences
run. A slot belongs to its adapter while sequences that use it run. Otherwise another adapter may
get the slot: the slot of an adapter that no sequence asks for goes first, then that of the least
recently used one.

    on disk or elsewhere ──prepare──> reading ──refresh──> ready ──acquire──> loaded by a plan
                                          └──────drop (it can't be read)

A preempted sequence keeps no slot; it is admitted again like a new one. So no sequence holds one
slot while it waits for another, and the first sequence in the policy's order gets a slot. To free a
slot, `running_set` preempts lower-ranked sequences, and `admission` admits no other sequence once
the first was overtaken too often. This module handles digests and slots, not weights or files.
`running_set` owns the object.
"""

from collections import Counter
from typing import Protocol

from quire.core.adapters import BASE_MODEL, NO_SLOT
from quire.core.sequence import Sequence
from quire.core.step import AdapterLoad


class AdapterSource(Protocol):
    """The source of adapters' weights, implemented by `adapters.store`."""

    def begin(self, digest: str) -> bool:
        """Begin to read this adapter, unless it is being read or ready.

        Returns whether it is ready for the runner to load. It stays ready until the runner has
        loaded it, or until `release`.
        """
        ...

    def release(self, digest: str) -> None:
        """Stop keeping an adapter ready, because it will not be loaded after all."""
        ...


class NoAdapters:
    """The adapter source of an engine without adapters."""

    def begin(self, digest: str) -> bool:
        raise AssertionError("a sequence has an adapter, but this engine has none")

    def release(self, digest: str) -> None:
        pass


class AdapterResidency:
    """The adapter slots of one engine.

    Invariant: no two adapters have the same slot. An adapter that a running sequence uses was
    loaded into its slot by an earlier plan, or will be loaded by the coming plan. `_reading` and
    `_ready` are disjoint; their adapters have slots and no users.
    """

    def __init__(self, num_slots: int = 0, source: AdapterSource | None = None) -> None:
        self.num_slots = num_slots
        #: Number of adapter loads that plans have carried out since the start.
        self.num_loads = 0
        self._source = source or NoAdapters()
        self._slots: dict[str, int] = {}  # slot by digest, the least recently used first
        #: Adapters with a slot whose weights are being read.
        self._reading: set[str] = set()
        #: Adapters with a slot that the runner can load.
        self._ready: set[str] = set()
        self._users: Counter[str] = Counter()  # running sequences by adapter
        self._demand: Counter[str] = Counter()  # sequences that have not ended, by adapter

    @property
    def num_resident(self) -> int:
        """Number of adapters that are loaded in their slots."""
        return len(self._slots) - len(self._reading) - len(self._ready)

    @property
    def num_reading(self) -> int:
        """Number of adapters that have a slot and are being read."""
        return len(self._reading)

    def slots(self) -> dict[str, int]:
        """The slot of each adapter that has one, by digest."""
        return dict(self._slots)

    # ---- sequences and their slots ----------------------------------------------------------

    def count_sequence(self, sequence: Sequence) -> None:
        """Count a sequence that the scheduler accepted."""
        if sequence.adapter:
            self._demand[sequence.adapter] += 1

    def end(self, sequence: Sequence) -> None:
        """Stop counting a sequence that has ended."""
        if sequence.adapter:
            _subtract(self._demand, sequence.adapter)

    def acquire_slot(self, sequence: Sequence) -> AdapterLoad | None:
        """Give a running sequence the slot of its adapter.

        The caller has checked that `prepare` is true for the sequence, or that its parent runs.
        Returns the load that the coming plan has to carry out, or None.
        """
        digest = sequence.adapter
        if not digest:
            return None
        assert digest in self._slots and digest not in self._reading, f"{sequence} has no slot"
        self._users[digest] += 1
        sequence.adapter_slot = slot = self._slots.pop(digest)
        self._slots[digest] = slot  # now the most recently used
        if digest not in self._ready:
            return None
        self._ready.discard(digest)
        self.num_loads += 1
        return AdapterLoad(slot, digest)

    def release_slot(self, sequence: Sequence) -> None:
        """Stop using the slot of a sequence's adapter, because the sequence lost its row."""
        if sequence.adapter:
            _subtract(self._users, sequence.adapter)
            sequence.adapter_slot = NO_SLOT

    # ---- reading adapters -------------------------------------------------------------------

    def refresh(self) -> None:
        """Before a step, check which adapters have been read."""
        for digest in sorted(self._reading):
            if self._source.begin(digest):
                self._reading.discard(digest)
                self._ready.add(digest)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter is being read."""
        return sequence.adapter in self._reading

    def has_slot_for(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter has a slot or can get one."""
        digest = sequence.adapter
        return not digest or digest in self._slots or self._find_victim() is not None

    def prepare(self, sequence: Sequence) -> bool:
        """Give the sequence's adapter a slot and begin to read it; returns whether the sequence may
        run now.

        Only called while `has_slot_for` is true.
        """
        digest = sequence.adapter
        if not digest:
            return True
        if digest not in self._slots:
            victim = self._find_victim()
            assert victim is not None, f"{sequence} can't have a slot"
            self._slots[digest] = self._take_slot(victim)
            self._reading.add(digest)
            self.refresh()
        return digest not in self._reading

    def drop(self, digest: str) -> None:
        """Free the slot of an adapter that can't be read."""
        if digest in self._reading:
            self._reading.discard(digest)
            del self._slots[digest]

    def clear(self) -> None:
        """Forget all slots, because the contents of the runner's slots are unknown; no sequence may
        be running."""
        assert not self._users, f"sequences run with {dict(self._users)}"
        for digest in [*self._reading, *self._ready]:
            self._source.release(digest)
        self._slots.clear()
        self._reading.clear()
        self._ready.clear()

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless the invariant holds; running: all sequences with rows."""
        users = Counter(sequence.adapter for sequence in running if sequence.adapter)
        assert users == self._users, f"adapters in use are {users}, counted are {self._users}"
        taken = list(self._slots.values())
        assert len(set(taken)) == len(taken) and all(0 <= slot < self.num_slots for slot in taken)
        assert not self._reading & self._ready, "an adapter is being read, and ready"
        waiting = self._reading | self._ready
        assert waiting <= self._slots.keys() and not waiting & users.keys(), waiting
        for sequence in running:
            expected = self._slots[sequence.adapter] if sequence.adapter else NO_SLOT
            assert sequence.adapter_slot == expected, f"{sequence} is in a wrong slot"

    def _find_victim(self) -> str | None:
        """The adapter that loses its slot; BASE_MODEL if a slot is free, None if none can be
        freed."""
        if len(self._slots) < self.num_slots:
            return BASE_MODEL
        users, reading = self._users, self._reading
        idle = [digest for digest in self._slots if not users[digest] and digest not in reading]
        # A ready adapter usually belongs to a sequence that starts next, so it loses its slot last.
        order = (digest for digest in idle if not self._demand[digest])
        return next(order, min(idle, key=self._ready.__contains__, default=None))

    def _take_slot(self, victim: str) -> int:
        """Take the slot of `victim`, or a free one."""
        if victim == BASE_MODEL:
            return min(set(range(self.num_slots)) - set(self._slots.values()))
        if victim in self._ready:
            self._ready.discard(victim)
            self._source.release(victim)
        return self._slots.pop(victim)


def _subtract(counts: Counter[str], key: str) -> None:
    """Subtract one, and remove an entry at 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
