"""Which contents are kept and where: an index in memory over the records of all segments.

`find`, `place` and `tails` take no lock, so that whoever asks never waits; each sees the index as
it is at some time of the call. What changes it takes the lock for a moment.
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
"""That are listed of one parent: after a prompt that all requests begin with there may be many
thousand, and whoever asks compares each."""

Key = tuple[int, bytes]
"""(group, name)."""

PLACE = np.dtype([("segment", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")])
"""A `Place` as the index has it: small in memory, and many are looked up in few calls."""

_PLACE = struct.Struct("<qqq16s")
_NO_TAILS: dict[Key, Tail] = {}

assert _PLACE.size == PLACE.itemsize


class Place(NamedTuple):
    """Where a payload lies, and what it must be."""

    segment: int
    offset: int
    num_bytes: int
    digest: bytes


class Places(NamedTuple):
    """Those of several keys. rows: [n] PLACE; numbers: [n] int64, of the keys that have them."""

    rows: NDArray[Any]
    numbers: NDArray[np.int64]


def place_of(row: np.void) -> Place:
    """Of one row of `Places`."""
    return Place(*_PLACE.unpack(row.tobytes()))


class RecordIndex:
    """Invariant: a key is in `_tail_parts`, and its tail among those of its parent, if and only if
    it is in `_places` with tokens; no parent has an empty list; only what is in `_places` has hits.
    """

    def __init__(self) -> None:
        self._places: dict[Key, bytes] = {}  # PLACE
        self._tail_parts: dict[Key, tuple[bytes, bytes]] = {}  # parent, tokens
        self._tails: dict[bytes, dict[Key, Tail]] = {}  # by parent
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
        """Of those that are kept."""
        rows = list(map(self._places.get, keys))
        if None not in rows:
            numbers = np.arange(len(keys))
        else:
            numbers = np.array([number for number, row in enumerate(rows) if row], np.int64)
        return Places(np.frombuffer(b"".join(filter(None, rows)), PLACE), numbers)

    def tails(self, parent: bytes) -> list[Tail]:
        """The partly filled blocks with tokens that follow a digest, each once: the MAX_TAILS that
        were written last, the last one first."""
        # Without the lock, which a writer holds while it waits for the interpreter's: the engine's
        # thread asks here in each step. A writer may change the dict between two of these calls.
        while True:
            tails = self._tails.get(parent, _NO_TAILS).values()
            try:
                return list(dict.fromkeys(islice(reversed(tails), MAX_TAILS)))
            except RuntimeError:
                continue

    def tail_parts(self, key: Key) -> tuple[bytes, bytes]:
        """Parent and tokens of a tail; both empty for what is none."""
        return self._tail_parts.get(key, (b"", b""))

    def learn(self, records: Iterable[Record], segment: int) -> list[Key]:
        """Put records in; later ones replace earlier ones. Returns their keys."""
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
        """Take a content out, unless it has moved to another place. Whether it was there."""
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
        """Nothing is found any more."""
        with self._lock:
            self._places.clear()
            self._tail_parts.clear()
            self._tails.clear()
            self._hits.clear()

    def count_hits(self, keys: Sequence[Key]) -> None:
        """These were loaded."""
        with self._lock:
            hits, places = self._hits, self._places
            for key in keys:
                if key in places:
                    hits[key] = hits.get(key, 0) + 1

    def num_hits(self, key: Key) -> int:
        """Since it was written, or since `clear_hits`."""
        return self._hits.get(key, 0)

    def clear_hits(self, key: Key) -> None:
        with self._lock:
            self._hits.pop(key, None)
