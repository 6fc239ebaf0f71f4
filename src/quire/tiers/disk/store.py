"""Stores the records of one namespace in segment files, within a budget of bytes.

One thread calls `append`, `prepare_to_write` and `seal`; any thread may call `read` and use
`index`.

The index has the records that this process has written and those that it found at its start. A read
succeeds only if the payload has the digest in the index. So a record that was damaged later, or
lost in a power failure, counts as a cache miss.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.memory.tiers.contract import StoreOrder
from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.tiers.disk.files import MAX_GAP_BYTES, Files, RecordRun, Targets
from quire.tiers.disk.folder import CacheFolder, SegmentFile, segment_files
from quire.tiers.disk.io_limits import DamageLog
from quire.tiers.disk.open_files import OpenFiles
from quire.tiers.disk.record import ENTRY_BYTES, Record, payload_digest, record_bytes
from quire.tiers.disk.record_index import Key, Place, Places, RecordIndex, place_of
from quire.tiers.disk.segment import (
    DESCRIPTOR_BYTES,
    TRAILER_BYTES,
    Contents,
    OpenSegment,
    read_segment,
    segment_path,
)

MAX_SEGMENT_BYTES = 256 << 20
SEGMENTS_IN_BUDGET = 8
"""The budget holds at least this many segments, so that evicting a segment loses only a small part
of the records."""
REWRITTEN_SHARE = 0.25
"""When a segment is evicted, records that were loaded since they were written are copied to the
open segment, up to this share of the evicted segment's bytes."""
RESUMED_SHARE = 0.75
"""At the start, the last segment is continued if less than this share of it is filled."""

logger = get_logger(__name__)


class ReadResult(NamedTuple):
    """The result of reading several records."""

    #: For each key, True if its payload was read and has the right digest.
    done: list[bool]
    #: The error that prevented some payloads from being read; None if there was no error.
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A segment that is closed for appending."""

    num_bytes: int
    #: The keys of its records.
    keys: list[Key]


def segment_bytes_for(budget_bytes: int, largest_payload_bytes: int, num_ranks: int = 1) -> int:
    """The maximum bytes of a segment. `budget_bytes` is for all ranks together; each rank has an
    equal share.

    Raises ConfigurationError if the budget is too small.
    """
    wanted = min(MAX_SEGMENT_BYTES, budget_bytes // num_ranks // SEGMENTS_IN_BUDGET)
    overhead = DESCRIPTOR_BYTES + TRAILER_BYTES + ENTRY_BYTES + (1 << 17)
    if record_bytes(largest_payload_bytes) + overhead > wanted:
        least = num_ranks * SEGMENTS_IN_BUDGET * (record_bytes(largest_payload_bytes) + overhead)
        ranks = "" if num_ranks == 1 else f" in each of {num_ranks} ranks"
        raise ConfigurationError(
            f"cache_size is {budget_bytes} bytes, but blocks of {largest_payload_bytes} bytes"
            f"{ranks} need at least {least} bytes; give a larger cache_size"
        )
    return wanted


class SegmentStore:
    """The segments of one namespace.

    Invariant: `used_bytes` is the size of all segments, including the future footer of the open
    segment. It is at most `budget_bytes`, plus REWRITTEN_SHARE of a segment during an eviction.
    Before `prepare_to_write` it may exceed this, if an earlier process had a larger budget.
    """

    def __init__(
        self,
        folder: CacheFolder,
        fingerprint: bytes,
        budget_bytes: int,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        may_rewrite: Callable[[int], bool] = lambda num_bytes: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the index, without writing anything. When a segment is evicted, `may_rewrite` is
        called with a record's size in bytes, and returns True if the record may be written again;
        it may raise OSError. Raises OSError."""
        self.path = folder.namespace(fingerprint)
        self.budget_bytes, self.segment_bytes = budget_bytes, segment_bytes
        self.damage = DamageLog(self.path, clock)
        self.num_rewritten = 0
        self.num_bytes_written = 0
        self._may_rewrite = may_rewrite
        self._folder, self._files, self._fingerprint = folder, folder.files, fingerprint
        self._old = folder.old_segments(fingerprint)
        self.index = RecordIndex()
        self._reading = OpenFiles(folder.files)
        self._sealed: dict[int, _Sealed] = {}  # by number, ascending
        self._open: OpenSegment | None = None
        self._unfinished: list[tuple[int, Contents]] = []  # segments to seal or to continue
        self._broken: set[int] = set()  # numbers of segments with an unreadable part
        self._next_number = 1
        self._recover()

    @property
    def used_bytes(self) -> int:
        # Iterates over copies, since metrics read this from other threads.
        return sum(old.num_bytes for old in list(self._old)) + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Total bytes of the segments of this namespace."""
        sealed_bytes = sum(sealed.num_bytes for sealed in list(self._sealed.values()))
        return sealed_bytes + (opened.sealed_bytes if (opened := self._open) else 0)

    def read(self, keys: Sequence[Key], targets: Targets) -> ReadResult:
        """Read each key's content into its target, which must have the content's size. Adjacent
        records are read by one call. If a read fails, the bytes of its target are undefined."""
        done = np.zeros(len(keys), np.bool_)
        error: OSError | None = None
        waiting: list[int] | None = None  # indices of keys left to read; None means all
        for _ in range(3):  # retries, since an eviction may move a record to another segment
            places = _places_of(self.index, keys, waiting, targets.sizes)
            waiting = []
            for run in _runs(places, self._broken):
                try:
                    self._read_run(run, keys, targets, done)
                except FileNotFoundError:  # its segment was evicted
                    waiting += run.numbers.tolist()
                except OSError as raised:
                    error = raised
                    self._broken.add(_segment_of(run))
                    self._read_one_by_one(run, keys, targets, done)
            if not waiting:
                break
        for number in waiting or ():  # their file was removed by another program
            if (place := self.index.place(keys[number])) is not None:
                self.index.forget(keys[number], place)
        return ReadResult(done.tolist(), error)

    def append(self, orders: Sequence[StoreOrder], payloads: Sequence[memoryview]) -> None:
        """Write contents that are not stored yet. Raises OSError; then only the contents that are
        in the index were written."""
        batch: list[tuple[Record, memoryview]] = []
        batch_bytes = 0
        for order, payload in zip(orders, payloads, strict=True):
            digest = payload_digest(payload)
            record = Record(
                order.group, order.name, order.parent, order.tokens, 0, len(payload), digest
            )
            needed = needed_bytes(record)
            if batch and not self._fits(batch_bytes + needed):
                self._write(batch, batch_bytes)
                batch, batch_bytes = [], 0
            batch.append((record, payload))
            batch_bytes += needed
        if batch:
            self._write(batch, batch_bytes)

    def prepare_to_write(self) -> None:
        """Bring the folder within the budget, seal unsealed segments, and continue the last segment
        if it has room.

        Has to be called before anything else is written. Raises OSError; if a segment can't be
        written to, the next call skips it.
        """
        self._make_room(0)
        while self._unfinished:
            number, contents = self._unfinished[0]
            if number in self._sealed:
                self.seal()
            del self._unfinished[0]
            if number in self._sealed:
                self._open = OpenSegment.resume(
                    self._files, self.path, number, self._fingerprint, contents
                )
                del self._sealed[number]

    def remove_all(self) -> None:
        """Remove all segments of this namespace. Raises OSError; then some segments are left, and
        the caller may try again."""
        self.index.forget_all()
        self._unfinished.clear()
        opened, self._open = self._open, None
        if opened is not None:
            self._sealed[opened.number] = _Sealed(opened.sealed_bytes, [])
            opened.close_unsealed()
        while self._sealed:
            self._evict(min(self._sealed))

    def seal(self) -> None:
        """Seal the open segment, if there is one. Raises OSError; then the segment stays unsealed,
        but its records can still be found by their headers."""
        opened, self._open = self._open, None
        if opened is None:
            return
        keys = [(record.group, record.name) for record in opened.records]
        self._sealed[opened.number] = _Sealed(opened.sealed_bytes, keys)
        opened.seal()

    def _recover(self) -> None:
        if not self.path.exists():
            return
        found = segment_files(self._files, self.path)
        for number, file in found.items():
            contents = self._contents(number, file.path)
            if contents is None:
                self._old.insert(0, file)
                continue
            if (num_unread := 0 if contents.is_sealed else file.num_bytes - contents.end) > 0:
                logger.warning(
                    "%s: the last %d of %d bytes are unreadable: cut off by a kill, or damaged",
                    *(file.path, num_unread, file.num_bytes),
                )
            keys = self.index.learn(contents.records, number)
            self._sealed[number] = _Sealed(file.num_bytes, keys)
            has_room = contents.end < self.segment_bytes * RESUMED_SHARE
            if not contents.is_sealed or (has_room and number == max(found)):
                self._unfinished.append((number, contents))
        self._next_number = max(self._sealed, default=0) + 1

    def _contents(self, number: int, path: Path) -> Contents | None:
        try:
            return read_segment(self._files, path, number, self._fingerprint)
        except OSError as error:
            logger.warning("%s can't be read, so its records are not found: %s", path, error)
            return None

    def close(self) -> None:
        """Close all files that are open for reading. A file in use is closed after its last
        read."""
        self._reading.close()

    # -- reading -----------------------------------------------------------------------------------

    def _read_run(
        self, run: Places, keys: Sequence[Key], targets: Targets, done: NDArray[np.bool_]
    ) -> None:
        """Read records of one segment by one call, and set `done` for each. Raises OSError."""
        rows, numbers = run
        records = RecordRun(rows["offset"], rows["num_bytes"], rows["digest"], numbers)
        with self._reading.reading(segment_path(self.path, _segment_of(run))) as descriptor:
            are_sound = self._files.read_records(descriptor, records, targets)
        done[numbers] = are_sound
        damaged = zip(rows[~are_sound], numbers[~are_sound].tolist(), strict=True)
        self.damage.count(
            sum(self.index.forget(keys[number], place_of(row)) for row, number in damaged)
        )
        if are_sound.all() and len(numbers) == len(keys):
            self.index.count_hits(keys)
        else:
            self.index.count_hits([keys[number] for number in numbers[are_sound].tolist()])

    def _read_one_by_one(
        self, run: Places, keys: Sequence[Key], targets: Targets, done: NDArray[np.bool_]
    ) -> None:
        """Read the records of a failed run one by one, and remove from the index those that can't
        be read."""
        for begin, number in enumerate(run.numbers.tolist()):
            try:
                self._read_run(_part(run, slice(begin, begin + 1)), keys, targets, done)
            except OSError:  # the caller reports the first error of the run
                self.damage.count(self.index.forget(keys[number], place_of(run.rows[begin])))

    # -- writing -----------------------------------------------------------------------------------

    def _fits(self, num_bytes: int) -> bool:
        """True if records of `num_bytes` fit into the open segment, or into a new one if no segment
        is open."""
        used = self._open.sealed_bytes if self._open else DESCRIPTOR_BYTES + TRAILER_BYTES
        return used + num_bytes <= self.segment_bytes

    def _write(self, batch: Sequence[tuple[Record, memoryview]], num_bytes: int) -> None:
        """Append records that fit into one segment."""
        self._make_room(num_bytes + DESCRIPTOR_BYTES + TRAILER_BYTES)
        self._append(batch, num_bytes)

    def _append(self, batch: Sequence[tuple[Record, memoryview]], num_bytes: int) -> None:
        if self._open is not None and (self._open.is_broken or not self._fits(num_bytes)):
            self.seal()
        if self._open is None:
            self._files.make_folder(self.path)
            # Skip numbers whose file name another program has used.
            while self._files.exists(segment_path(self.path, self._next_number)):
                self._next_number += 1
            self._open = OpenSegment.create(
                self._files, self.path, self._next_number, self._fingerprint
            )
            self._next_number += 1
        records, payloads = zip(*batch, strict=True)
        self.index.learn(self._open.append(records, payloads), self._open.number)
        self.num_bytes_written += num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Evict segments until `num_bytes` more bytes fit into the budget. Raises OSError."""
        while self.used_bytes + num_bytes > self.budget_bytes:
            if self._old:
                self._remove_old(self._old[0])
                continue
            if not self._sealed:
                self.seal()  # only the open segment is left
            if not self._sealed:
                return
            self._evict(min(self._sealed))

    def _remove_old(self, old: SegmentFile) -> None:
        _unlink(self._files, old.path)
        self._reading.drop(old.path)
        self._old.remove(old)
        if old.path.parent != self.path:
            self._folder.remove_if_empty(old.path.parent)

    def _evict(self, number: int) -> None:
        """Remove a segment. Records that were loaded are first written again, the most frequently
        loaded first, up to REWRITTEN_SHARE of the segment's bytes."""
        sealed = self._sealed[number]
        num_hits = self.index.num_hits
        live = [
            (key, place)
            for key in dict.fromkeys(sealed.keys)
            if (place := self.index.place(key)) is not None and place.segment == number
        ]
        try:
            self._rewrite([entry for entry in live if num_hits(entry[0])], sealed.num_bytes)
        except OSError as error:
            # On a full disk, only the removal makes room. Any other error will recur at the next
            # write.
            logger.debug("%s: not rewritten: %s", segment_path(self.path, number), error)
        for key, place in live:
            self.index.forget(key, place)
        path = segment_path(self.path, number)
        _unlink(self._files, path)
        self._reading.drop(path)
        del self._sealed[number]
        self._broken.discard(number)

    def _rewrite(self, live: list[tuple[Key, Place]], num_bytes: int) -> None:
        left = int(num_bytes * REWRITTEN_SHARE)
        for key, place in sorted(live, key=lambda entry: -self.index.num_hits(entry[0])):
            record = Record(*key, *self.index.tail_parts(key), 0, place.num_bytes, place.digest)
            needed = needed_bytes(record) + DESCRIPTOR_BYTES + TRAILER_BYTES
            if needed > left or not self._may_rewrite(needed):
                break
            payload = bytearray(place.num_bytes)
            if self.read([key], Targets.in_turn(payload, [len(payload)])).done[0]:
                self._append([(record, memoryview(payload))], needed_bytes(record))
                left -= needed
                self.index.clear_hits(key)
                self.num_rewritten += 1


def _unlink(files: Files, path: Path) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        logger.warning("%s was removed by another program", path)


def needed_bytes(record: Record) -> int:
    """Number of bytes of a record in a segment, including its entry in the footer."""
    return record_bytes(record.num_bytes, len(record.tokens)) + ENTRY_BYTES + len(record.tokens)


def _places_of(
    index: RecordIndex, keys: Sequence[Key], waiting: list[int] | None, sizes: NDArray[np.int64]
) -> Places:
    """Look up the places of the keys whose indices are in `waiting`; None means all keys. Leaves
    out keys that are not stored, and those whose stored size differs from `sizes`."""
    if waiting is None:
        places = index.places(keys)
    else:
        places = index.places([keys[number] for number in waiting])
        places = places._replace(numbers=np.array(waiting)[places.numbers])
    have_size = places.rows["num_bytes"] == sizes[places.numbers]
    return places if have_size.all() else _part(places, have_size)


def _segment_of(run: Places) -> int:
    """The number of the segment that has all records of a run."""
    return int(run.rows["segment"][0])


def _part(places: Places, which: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Places:
    return Places(places.rows[which], places.numbers[which])


def _runs(places: Places, broken: Collection[int]) -> list[Places]:
    """Group places into runs: records of one segment with small gaps. In broken segments each
    record is its own run, since the gap between two records may be unreadable."""
    cuts = _cuts(places, broken)
    if len(cuts) == 0:  # nearly always
        return [places] if len(places.numbers) else []
    places = _part(places, np.lexsort((places.rows["offset"], places.rows["segment"])))
    ends = [0, *_cuts(places, broken).tolist(), len(places.numbers)]
    return [_part(places, slice(begin, end)) for begin, end in pairwise(ends)]


def _cuts(places: Places, broken: Collection[int]) -> NDArray[np.int64]:
    """The indices at which a new run begins, except 0, for `places` in their present order."""
    segments, offsets = places.rows["segment"], places.rows["offset"]
    gaps = offsets[1:] - offsets[:-1] - places.rows["num_bytes"][:-1]
    are_near = (segments[1:] == segments[:-1]) & (gaps >= 0) & (gaps <= MAX_GAP_BYTES)
    if broken:
        are_near &= ~np.isin(segments[1:], list(broken))
    return np.flatnonzero(~are_near) + 1
