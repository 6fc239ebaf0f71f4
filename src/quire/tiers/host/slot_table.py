"""Contents of the host memory's slots, with eviction of the least recently used."""

import heapq
from collections import OrderedDict
from itertools import islice

from quire.core.memory.tiers.contract import Tail

MAX_TAILS = 256
"""Maximum number of tails listed for one parent; the caller compares each tail."""

Key = tuple[int, bytes]
"""(group, name)."""

_NO_TAILS: dict[Key, Tail] = {}


class SlotTable:
    """Tracks what each slot of host memory holds, and which slots are in use by copies.

    Invariant: a slot is free (no content, not pinned), idle (a content, not pinned), or pinned by
    as many copies (moves) as `_num_pins` says, with or without a content. `find` finds a content if
    and only if a slot has it. A tail is listed as long as its content has a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._slot_of: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._num_pinned = 0
        # A heap with the lowest slot first, so that blocks stored together get adjacent slots and
        # are copied at once.
        self._free = list(range(num_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used slot first
        self._tails: dict[bytes, dict[Key, Tail]] = {}  # by parent
        self._parents: dict[Key, bytes] = {}  # the parents of tails

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_pinned(self) -> int:
        """Number of slots that are pinned by moves."""
        return self._num_pinned

    @property
    def num_takeable(self) -> int:
        """Number of slots that `acquire` could return, free or idle."""
        return self.num_slots - self._num_pinned

    def find(self, key: Key) -> int | None:
        """The slot that holds a content, or None."""
        return self._slot_of.get(key)

    def tails(self, parent: bytes) -> list[Tail]:
        """The partly filled blocks that follow a digest, without duplicates: the MAX_TAILS stored
        last, newest first."""
        found = self._tails.get(parent, _NO_TAILS)
        return list(dict.fromkeys(islice(reversed(found.values()), MAX_TAILS)))

    def tail_parts(self, key: Key) -> tuple[bytes, bytes]:
        """Parent and tokens of a tail; both empty for another content."""
        parent = self._parents.get(key)
        return (b"", b"") if parent is None else (parent, self._tails[parent][key].tokens)

    def acquire(self) -> int | None:
        """Take a slot without content, pinned once, evicting a content if necessary. None if moves
        use all slots."""
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            self._forget(slot)
            self.num_evicted += 1
        else:
            return None
        self._num_pins[slot] = 1
        self._num_pinned += 1
        return slot

    def record_content(self, slot: int, key: Key, parent: bytes = b"", tokens: bytes = b"") -> bool:
        """Record the content of a pinned slot. Returns False, and changes nothing, if another slot
        has that content."""
        assert self._num_pins[slot] and self._keys[slot] is None, "the slot was not taken for this"
        if key in self._slot_of:
            return False
        self._slot_of[key] = slot
        self._keys[slot] = key
        if tokens:
            self._parents[key] = parent
            self._tails.setdefault(parent, {})[key] = Tail(tokens, key[1])
        return True

    def pin(self, slot: int) -> None:
        """Keep a slot's content for a move until `unpin`. This counts as a use."""
        if not self._num_pins[slot]:
            del self._idle[slot]
            self._num_pinned += 1
        self._num_pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Remove the pin of a move."""
        self._num_pins[slot] -= 1
        if self._num_pins[slot]:
            return
        self._num_pinned -= 1
        if self._keys[slot] is None:
            heapq.heappush(self._free, slot)
        else:
            self._idle[slot] = None

    def forget_all(self) -> None:
        """Remove all contents. Pinned slots stay pinned."""
        for slot in list(self._slot_of.values()):
            self._forget(slot)
        for slot in self._idle:
            heapq.heappush(self._free, slot)
        self._idle.clear()

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None, "the slot holds no content"
        self._keys[slot] = None
        del self._slot_of[key]
        parent = self._parents.pop(key, None)
        if parent is not None:
            del self._tails[parent][key]
            if not self._tails[parent]:
                del self._tails[parent]
