"""Slots in device memory for what must lie beside the model before a row can compute.

One object has the slots of LoRA adapters, another the slots of prompts' contents (the embeddings of
an image). A slot holds one item, named by its digest. While an item is being read, other sequences
run. A slot belongs to its item while it is in use. Otherwise another item may get the slot. Items
that no sequence asks for lose their slots first, then the least recently used item.

    on disk or elsewhere ──prepare──> reading ──refresh──> ready ──take_load──> loaded by a plan
                                          └──────drop (it can't be read)

    adapters    in use while a sequence runs that needs it    `running_set`
    contents    in use while the plan is made that needs it   `content_loads`

A preempted sequence keeps no slot; it is admitted again like a new one. So no sequence holds one
slot while it waits for another, and the first sequence in the policy's order gets a slot. To free
an adapter's slot, `running_set` preempts lower-ranked sequences, and `admission` admits no other
sequence once the first was overtaken too often. This module handles digests and slots, not weights
or files.
"""

from collections import Counter
from typing import Protocol

from quire.core.adapters import NO_SLOT
from quire.core.step import ItemLoad

NOTHING = ""
"""The digest of nothing: it needs no slot (`core.adapters.BASE_MODEL`)."""


class ItemSource(Protocol):
    """The source of the items of one kind; `adapters.store` has the weights of adapters."""

    def begin(self, digest: str) -> bool:
        """Begin to read this item, unless it is being read or ready.

        Returns whether it is ready for the runner to load. It stays ready until the runner has
        loaded it, or until `release`.
        """
        ...

    def release(self, digest: str) -> None:
        """Stop keeping an item ready, because it will not be loaded after all."""
        ...


class NoItems:
    """The source of an engine without items of a kind."""

    def begin(self, digest: str) -> bool:
        raise AssertionError("a sequence needs an adapter or a content, but this engine has none")

    def release(self, digest: str) -> None:
        pass


class Residency:
    """The slots for items of one kind.

    Invariant: no two items have the same slot. An item in use was loaded into its slot by an
    earlier plan, or will be loaded by the coming plan. `_reading` and `_ready` are disjoint; their
    items have slots. Methods that take a digest ignore NOTHING.
    """

    def __init__(self, num_slots: int = 0, source: ItemSource | None = None) -> None:
        self.num_slots = num_slots
        #: Number of loads that plans have carried out since the start.
        self.num_loads = 0
        self._source = source or NoItems()
        self._slots: dict[str, int] = {}  # slot by digest, the least recently used first
        #: Items with a slot that are being read.
        self._reading: set[str] = set()
        #: Items with a slot that the runner can load.
        self._ready: set[str] = set()
        self._users: Counter[str] = Counter()  # number of uses by item
        self._demand: Counter[str] = Counter()  # sequences that have not ended, by item

    @property
    def num_resident(self) -> int:
        """Number of items that are loaded in their slots."""
        return len(self._slots) - len(self._reading) - len(self._ready)

    @property
    def num_reading(self) -> int:
        """Number of items that have a slot and are being read."""
        return len(self._reading)

    def slots(self) -> dict[str, int]:
        """The slot of each item that has one, by digest."""
        return dict(self._slots)

    # ---- uses -------------------------------------------------------------------------------

    def add_demand(self, digest: str) -> None:
        """Count a sequence that the scheduler accepted and that needs the item."""
        if digest:
            self._demand[digest] += 1

    def end_demand(self, digest: str) -> None:
        """Stop counting a sequence that has ended."""
        if digest:
            _subtract(self._demand, digest)

    def acquire(self, digest: str) -> int:
        """Use an item; no other item gets its slot until `release`. Returns the slot.

        The caller has called `prepare`, or another use of the item goes on.
        """
        if not digest:
            return NO_SLOT
        assert digest in self._slots, f"{digest} has no slot"
        self._users[digest] += 1
        self._slots[digest] = slot = self._slots.pop(digest)  # now the most recently used
        return slot

    def take_load(self, digest: str) -> ItemLoad | None:
        """The load that the coming plan has to carry out before rows read the item, or None."""
        assert digest not in self._reading, f"{digest} is still being read"
        if digest not in self._ready:
            return None
        self._ready.discard(digest)
        self.num_loads += 1
        return ItemLoad(self._slots[digest], digest)

    def release(self, digest: str) -> None:
        """End one use of an item."""
        if digest:
            _subtract(self._users, digest)

    # ---- reading items ----------------------------------------------------------------------

    def refresh(self) -> None:
        """Before a step, check which items have been read."""
        for digest in sorted(self._reading):
            if self._source.begin(digest):
                self._reading.discard(digest)
                self._ready.add(digest)

    def is_reading(self, digest: str) -> bool:
        """Whether the item is being read."""
        return digest in self._reading

    def has_slot_for(self, digest: str) -> bool:
        """Whether the item has a slot or can get one."""
        return not digest or digest in self._slots or self._find_victim() is not None

    def prepare(self, digest: str) -> bool:
        """Give the item a slot and begin to read it; returns whether rows may use it now.

        Only called while `has_slot_for` is true.
        """
        if not digest:
            return True
        if digest not in self._slots:
            victim = self._find_victim()
            assert victim is not None, f"{digest} can't have a slot"
            self._slots[digest] = self._take_slot(victim)
            # Asks for no other item: rows that wait for one were left out of the plan before.
            (self._ready if self._source.begin(digest) else self._reading).add(digest)
        return digest not in self._reading

    def drop(self, digest: str) -> None:
        """Free the slot of an item that can't be read."""
        if digest in self._reading:
            self._reading.discard(digest)
            del self._slots[digest]

    def clear(self) -> None:
        """Forget all slots, because the contents of the runner's slots are unknown; nothing may be
        in use."""
        assert not self._users, f"in use are {dict(self._users)}"
        for digest in [*self._reading, *self._ready]:
            self._source.release(digest)
        self._slots.clear()
        self._reading.clear()
        self._ready.clear()

    def check(self, users: Counter[str]) -> None:
        """Raise AssertionError unless the invariant holds between two steps; users: the uses of
        each item."""
        assert users == self._users, f"in use are {users}, counted are {self._users}"
        taken = list(self._slots.values())
        assert len(set(taken)) == len(taken) and all(0 <= slot < self.num_slots for slot in taken)
        assert not self._reading & self._ready, "an item is being read, and ready"
        waiting = self._reading | self._ready
        assert waiting <= self._slots.keys() and not waiting & users.keys(), waiting

    def _find_victim(self) -> str | None:
        """The item that loses its slot; NOTHING if a slot is free, None if none can be freed."""
        if len(self._slots) < self.num_slots:
            return NOTHING
        users, reading = self._users, self._reading
        idle = [digest for digest in self._slots if not users[digest] and digest not in reading]
        # A ready item usually belongs to a sequence that starts next, so it loses its slot last.
        order = (digest for digest in idle if not self._demand[digest])
        return next(order, min(idle, key=self._ready.__contains__, default=None))

    def _take_slot(self, victim: str) -> int:
        """Take the slot of `victim`, or a free one."""
        if victim == NOTHING:
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
