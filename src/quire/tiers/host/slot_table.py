"""Which content each slot of the host's memory holds; the one used longest ago makes room."""

import heapq
from collections import OrderedDict
from itertools import islice

from quire.core.memory.tiers.contract import Tail

MAX_TAILS = 256
"""That are listed of one parent: whoever asks compares each."""

Key = tuple[int, bytes]
"""(group, name)."""

_NO_TAILS: dict[Key, Tail] = {}


class SlotTable:
    """Slots, by number.

    Invariant: a slot is free (no content, not pinned), idle (a content, not pinned), or pinned by
    as many moves as `_num_pins` says, with a content or without. `find` knows a content if and only
    if a slot has it; a tail is listed as long as its content has a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._slot_of: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._num_pinned = 0
        # The lowest first: what is stored at once lies side by side, and is copied at once.
        self._free = list(range(num_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one used longest ago first
        self._tails: dict[bytes, dict[Key, Tail]] = {}  # by parent
        self._parents: dict[Key, bytes] = {}  # of tails

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_pinned(self) -> int:
        """Slots that moves use."""
        return self._num_pinned

    @property
    def num_takeable(self) -> int:
        """Slots that `take` would give, one after the other."""
        return self.num_slots - self._num_pinned

    def find(self, key: Key) -> int | None:
        """The slot that holds a content."""
        return self._slot_of.get(key)

    def tails(self, parent: bytes) -> list[Tail]:
        """The partly filled blocks that follow a digest, each once: the MAX_TAILS that were stored
        last, the last one first."""
        found = self._tails.get(parent, _NO_TAILS)
        return list(dict.fromkeys(islice(reversed(found.values()), MAX_TAILS)))

    def tail_parts(self, key: Key) -> tuple[bytes, bytes]:
        """Parent and tokens of a tail; both empty for what is none."""
        parent = self._parents.get(key)
        return (b"", b"") if parent is None else (parent, self._tails[parent][key].tokens)

    def take(self) -> int | None:
        """A slot without content, pinned once; None where moves use all."""
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

    def fill(self, slot: int, key: Key, parent: bytes = b"", tokens: bytes = b"") -> bool:
        """A pinned slot holds a content now. Returns False, and changes nothing, where another slot
        has it already."""
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
        """A move uses its content, which stays until `unpin`; that counts as a use."""
        if not self._num_pins[slot]:
            del self._idle[slot]
            self._num_pinned += 1
        self._num_pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """A move uses it no more."""
        self._num_pins[slot] -= 1
        if self._num_pins[slot]:
            return
        self._num_pinned -= 1
        if self._keys[slot] is None:
            heapq.heappush(self._free, slot)
        else:
            self._idle[slot] = None

    def forget_all(self) -> None:
        """Nothing is found any more; what moves use, they go on to use."""
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
