"""In-memory index from stored contents to their places in segment files.

A content is what a block holds for one KV group; a tail is the content of a partly filled block.
`find`, `place` and `tails` take no lock, so they never wait. Each sees the index at some moment
during the call. Methods that change the index hold the lock briefly.
"""

import struct
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.memory.tiers.contract import Tail
from quire.tiers.disk.record import Record

MAX_TAILS = 256
"""Maximum number of tails returned for one parent digest. A common prompt may have thousands of
tails, and the caller compares each."""

Key = tuple[int, bytes]
"""(KV group, name) of a content."""

PLACE = np.dtype([("segment", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")])
"""A `Place` as the index stores it: in few bytes, and so that many places form one array."""

_PLACE = struct.Struct("<qqq16s")
_NO_TAILS: dict[Key, Tail] = {}

assert _PLACE.size == PLACE.itemsize


class Place(NamedTuple):
    """The position of a payload in a segment, with the digest that the payload must have."""

    segment: int
    offset: int
    num_bytes: int
    digest: bytes


class Places(NamedTuple):
    """The places of n keys."""

    #: The places, of shape [n] and dtype PLACE.
    rows: NDArray[Any]
    #: For each place, the index of its key in the caller's list, of shape [n].
    numbers: NDArray[np.int64]


def place_of(row: np.void) -> Place:
    """The place in one row of `Places`."""
    return Place(*_PLACE.unpack(row.tobytes()))


class RecordIndex:
    """Maps keys of contents to their places.

    Invariant: a key is in `_tail_parts`, and its tail is listed under its parent, if and only if
    the key is in `_places` with tokens. No parent has an empty list. Only keys in `_places` have
    hits.
    """

    def __init__(self) -> None:
        self._places: dict[Key, bytes] = {}  # values: packed PLACE
        self._tail_parts: dict[Key, tuple[bytes, bytes]] = {}  # values: (parent digest, tokens)
        self._tails: dict[bytes, dict[Key, Tail]] = {}  # by parent digest
        self._hits: dict[Key, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, group: int, name: bytes) -> bool:
        return (group, name) in self._places

    def place(self, key: Key) -> Place | None:
        row = self._places.get(key)
        return None if row is None else Place(*_PLACE.unpack(row))

    def places(self, keys: Sequence[Key]) -> Places:
        """The places of the given keys, without the keys that are not stored."""
        rows = list(map(self._places.get, keys))
        if None not in rows:
            numbers = np.arange(len(keys))
        else:
            numbers = np.array([number for number, row in enumerate(rows) if row], np.int64)
        return Places(np.frombuffer(b"".join(filter(None, rows)), PLACE), numbers)

    def tails(self, parent: bytes) -> list[Tail]:
        """The partly filled blocks whose prefix has the digest `parent`, without duplicates: at
        most MAX_TAILS, newest first."""
        # No lock here: the engine's thread calls this in each step, and a writer may hold the lock
        # while it waits for the GIL. So a writer may change the dict during the iteration.
        while True:
            tails = self._tails.get(parent, _NO_TAILS).values()
            try:
                return list(dict.fromkeys(islice(reversed(tails), MAX_TAILS)))
            except RuntimeError:
                continue

    def tail_parts(self, key: Key) -> tuple[bytes, bytes]:
        """Parent digest and tokens of a tail; both are empty for a full block."""
        return self._tail_parts.get(key, (b"", b""))

    def learn(self, records: Iterable[Record], segment: int) -> list[Key]:
        """Add records; later ones replace earlier ones. Returns their keys."""
        keys = []
        with self._lock:
            for record in records:
                group, name, parent, tokens, offset, num_bytes, digest = record
                key = group, name
                keys.append(key)
                self._places[key] = _PLACE.pack(segment, offset, num_bytes, digest)
                if tokens and key not in self._tail_parts:
                    self._tail_parts[key] = parent, tokens
                    self._tails.setdefault(parent, {})[key] = Tail(tokens, name)
        return keys

    def forget(self, key: Key, place: Place) -> bool:
        """Remove a content if it is at `place`. Returns False if it was removed or has moved to
        another place."""
        with self._lock:
            if self._places.get(key) != _PLACE.pack(*place):
                return False
            del self._places[key]
            self._hits.pop(key, None)
            parts = self._tail_parts.pop(key, None)
            if parts is not None:
                parent, _ = parts
                del self._tails[parent][key]
                if not self._tails[parent]:
                    del self._tails[parent]
        return True

    def forget_all(self) -> None:
        """Remove all contents."""
        with self._lock:
            self._places.clear()
            self._tail_parts.clear()
            self._tails.clear()
            self._hits.clear()

    def count_hits(self, keys: Sequence[Key]) -> None:
        """Add 1 to the number of loads of each key."""
        with self._lock:
            hits, places = self._hits, self._places
            for key in keys:
                if key in places:
                    hits[key] = hits.get(key, 0) + 1

    def num_hits(self, key: Key) -> int:
        """Number of loads since the content was written, or since `clear_hits`."""
        return self._hits.get(key, 0)

    def clear_hits(self, key: Key) -> None:
        with self._lock:
            self._hits.pop(key, None)
