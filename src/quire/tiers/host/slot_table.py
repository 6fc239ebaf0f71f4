"""Tracks which block's content each slot of host memory holds, with LRU eviction."""

import heapq
from collections import OrderedDict
from itertools import islice

from quire.core.memory.tiers.contract import Tail

MAX_TAILS = 256
"""Maximum number of tails returned for one parent digest, since the caller compares each tail. A
tail is a partly filled block."""

Key = tuple[int, bytes]
"""(KV group, name) of a content, which is what a block holds for one KV group."""

_NO_TAILS: dict[Key, Tail] = {}


class SlotTable:
    """Tracks the content of each slot of host memory, and which slots are in use by copies (moves).

    Invariant: a slot is free (no content, not pinned), idle (a content, not pinned), or pinned by
    `_num_pins[slot]` moves, with or without a content. `find` finds a content if and only if a slot
    has it. `tails` lists a tail if and only if a slot has its content.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._slot_of: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._num_pinned = 0
        # A heap with the lowest slot first, so that blocks stored together get adjacent slots,
        # which take a single copy.
        self._free = list(range(num_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used slot first
        self._tails: dict[bytes, dict[Key, Tail]] = {}  # by parent
        self._parents: dict[Key, bytes] = {}  # parent of each tail

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_takeable(self) -> int:
        """Number of slots that `acquire` could return: the free and the idle slots."""
        return self.num_slots - self._num_pinned

    def find(self, key: Key) -> int | None:
        """The slot that holds a content, or None."""
        return self._slot_of.get(key)

    def tails(self, parent: bytes) -> list[Tail]:
        """The partly filled blocks whose prefix has the digest `parent`, without duplicates: at
        most MAX_TAILS, newest first."""
        found = self._tails.get(parent, _NO_TAILS)
        return list(dict.fromkeys(islice(reversed(found.values()), MAX_TAILS)))

    def tail_parts(self, key: Key) -> tuple[bytes, bytes]:
        """Parent digest and tokens of a tail; both are empty for a full block."""
        parent = self._parents.get(key)
        return (b"", b"") if parent is None else (parent, self._tails[parent][key].tokens)

    def acquire(self) -> int | None:
        """Acquire a slot without content, with one pin; evicts a content if no slot is free. None
        if all slots are pinned."""
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
        """Record that a pinned slot now has the content `key`. Returns False, and changes nothing,
        if another slot has it."""
        assert self._num_pins[slot] and self._keys[slot] is None, "the slot is not newly acquired"
        if key in self._slot_of:
            return False
        self._slot_of[key] = slot
        self._keys[slot] = key
        if tokens:
            self._parents[key] = parent
            self._tails.setdefault(parent, {})[key] = Tail(tokens, key[1])
        return True

    def pin(self, slot: int) -> None:
        """Protect a slot's content from eviction until `unpin`. This counts as a use."""
        if not self._num_pins[slot]:
            del self._idle[slot]
            self._num_pinned += 1
        self._num_pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Remove one pin of a slot."""
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
