"""`quire cache`: says what a cache folder holds, checks every byte of it, or empties it.

    quire cache inspect FOLDER      changes nothing; an engine may be using the folder
    quire cache verify FOLDER       reads all records; changes only the process id in the lock
    quire cache empty FOLDER        removes all records; the secret stays

Folders that are not cache folders are refused, and only files that engines made are touched. Called
by `main`.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from quire.core.memory.memory_report import format_bytes
from quire.errors import ConfigurationError
from quire.tiers.disk.files import Files, read_whole
from quire.tiers.disk.folder import CacheFolder, segment_files
from quire.tiers.disk.record import payload_digest
from quire.tiers.disk.segment import Contents, read_segment, segment_number
from quire.tiers.fingerprint import SUFFIX, is_namespace, read_description

_LOCK = "lock"
_ALL_LOCKS = Path("/proc/locks")


@dataclass(slots=True)
class Namespace:
    """The records that a cache folder has for one model in one configuration."""

    fingerprint: str
    #: The model's name; None if the folder has no description of the namespace.
    label: str | None = None
    #: The configuration in a few words; None if there is no description.
    in_short: str | None = None
    num_segments: int = 0
    #: Number of segments without a footer. Their engine is still running or was killed.
    num_unsealed: int = 0
    #: Number of files that can't be read, or are not segments of this namespace.
    num_foreign: int = 0
    num_bytes: int = 0
    #: Block group -> number of records.
    num_records: dict[int, int] = field(default_factory=dict)
    #: The number of records that hold partly filled blocks.
    num_tails: int = 0
    payload_bytes: int = 0
    #: The time of the last write, in seconds since the epoch.
    changed_s: float = 0.0
    description: dict[str, Any] | None = None

    def lines(self) -> list[str]:
        """A readable summary."""
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.changed_s))
        unsealed = f"; {self.num_unsealed} not sealed" if self.num_unsealed else ""
        size = format_bytes(self.num_bytes)
        records = [f"{count} of group {group}" for group, count in self.num_records.items()]
        lines = [
            f"{self.fingerprint}  {self.label or 'not described'}",
            f"  {size} in {self.num_segments} segments, last written {changed}{unsealed}",
            f"  records: {', '.join(records) or 'none'}; partly filled blocks: {self.num_tails}",
        ]
        if self.num_foreign:
            lines.append(f"  files that are no segments of it, or unreadable: {self.num_foreign}")
        if self.in_short is not None:
            lines.append(f"  {self.in_short}")
        return lines


@dataclass(frozen=True, slots=True)
class Survey:
    """The contents of a cache folder."""

    folder: str
    #: The process id of the engine that uses the folder; None if no visible process uses it.
    holder: int | None
    num_bytes: int
    namespaces: list[Namespace]

    is_bad: ClassVar[bool] = False

    def lines(self) -> list[str]:
        """A line for the folder, then a few lines per namespace, the most recently written
        first."""
        used = "no engine uses it" if self.holder is None else f"process {self.holder} uses it"
        count = len(self.namespaces)
        first = f"{self.folder}: {format_bytes(self.num_bytes)}, namespaces: {count}; {used}"
        return [first, *(line for each in self.namespaces for line in ("", *each.lines()))]


@dataclass(slots=True)
class Check:
    """The result of verifying a cache folder."""

    folder: str
    num_records: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0.0
    #: "FILE: GROUP/NAME" for each record whose bytes have changed, and "FILE: headers" for each
    #: sealed segment with a changed header.
    damaged: list[str] = field(default_factory=list)
    #: Files that can't be read, or are not segments of their namespace.
    foreign: list[str] = field(default_factory=list)
    #: "FILE: BYTES" for each segment without a footer that has bytes after its last complete
    #: record: its process was killed during a write, or the file is damaged.
    unread: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        return bool(self.damaged or self.foreign)

    def lines(self) -> list[str]:
        """A line with the result, then a line for each fault."""
        size = format_bytes(self.num_bytes)
        rate = format_bytes(self.num_bytes / max(self.elapsed_s, 1e-9))
        first = f"{self.num_records} records, {size}, read in {self.elapsed_s:.1f} s ({rate}/s)"
        wrong = [f"damaged: {each}" for each in self.damaged]
        wrong += [f"no segment of its folder, or unreadable: {each}" for each in self.foreign]
        wrong += [f"cut off by a kill, or damaged: {each} bytes" for each in self.unread]
        if wrong:
            wrong.append(
                "an engine treats all of these as misses; `quire cache empty` removes them"
            )
        return [f"{first}: {'damaged' if self.is_bad else 'all sound'}", *wrong]


@dataclass(slots=True)
class Removal:
    """The result of emptying a cache folder."""

    folder: str
    num_files: int = 0
    num_bytes: int = 0

    is_bad: ClassVar[bool] = False

    def lines(self) -> list[str]:
        return [f"removed {self.num_files} files, {format_bytes(self.num_bytes)}"]


def main(action: str, folder: Path, *, as_json: bool) -> int:
    """Run the action `action`, print its result, and return the exit code.

    Raises ConfigurationError if the folder is not a cache folder, or if the action needs the
    folder's lock and an engine holds it. Raises OSError.
    """
    done = ACTIONS[action](folder)
    lines = [json.dumps(asdict(done), indent=1)] if as_json else done.lines()
    print("\n".join(lines))
    return int(done.is_bad)


# ---- inspect ------------------------------------------------------------------------------------


def survey(folder: Path) -> Survey:
    """Summarize a folder. Takes no lock and writes nothing."""
    _check_is_ours(folder)
    namespaces = [_namespace(path) for path in _namespaces(folder)]
    namespaces.sort(key=lambda each: -each.changed_s)
    num_bytes = sum(each.num_bytes for each in namespaces)
    return Survey(str(folder), holder_of(folder), num_bytes, namespaces)


def _namespace(path: Path) -> Namespace:
    found = Namespace(path.name)
    described = read_description(path.parent, path.name)
    if described is not None:
        found.label, found.in_short = described.label, described.in_short
        found.description = json.loads(described.to_json())
    num_records: Counter[int] = Counter()
    for file, contents in _segments(path):
        try:
            status = file.stat()
        except FileNotFoundError:  # evicted meanwhile
            continue
        found.num_bytes += status.st_size
        found.changed_s = max(found.changed_s, status.st_mtime)
        if contents is None:
            found.num_foreign += 1
            continue
        found.num_segments += 1
        found.num_unsealed += not contents.is_sealed
        num_records.update(record.group for record in contents.records)
        found.num_tails += sum(bool(record.tokens) for record in contents.records)
        found.payload_bytes += sum(record.num_bytes for record in contents.records)
    found.num_records = dict(sorted(num_records.items()))
    return found


def _namespaces(folder: Path) -> list[Path]:
    """The folders of the namespaces. Symbolic links are left out, since engines ignore them,
    too."""
    names = [path for path in folder.iterdir() if is_namespace(path.name)]
    return sorted(path for path in names if path.is_dir() and not path.is_symlink())


def _segments(namespace: Path) -> Iterator[tuple[Path, Contents | None]]:
    """The namespace's segment files with their contents; None for a file that is not a readable
    segment."""
    files = Files()
    for number, (path, _, _) in segment_files(files, namespace).items():
        try:
            contents = read_segment(files, path, number, bytes.fromhex(namespace.name))
        except OSError:
            contents = None
        yield path, contents


def holder_of(folder: Path) -> int | None:
    """The id of the process that holds the folder's lock, read from the kernel's list of locks.

    Taking the lock to test it could make a starting engine fail.
    """
    status = (folder / _LOCK).stat()
    if not _ALL_LOCKS.exists():
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in _ALL_LOCKS.read_text().splitlines():
        match line.split():  # if a process only waits, "->" follows the number
            case [_, "FLOCK", _, _, process, place, *_] if place == f"{device}:{status.st_ino}":
                return int(process)
    return None


def _check_is_ours(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder")
    if not (folder / _LOCK).is_file():
        raise ConfigurationError(
            f"{folder} is no cache folder: an engine with --cache-dir leaves a file {_LOCK!r} there"
        )


@contextmanager
def _held(folder: Path) -> Iterator[CacheFolder]:
    """Hold the folder's lock. Raises ConfigurationError if an engine uses the folder."""
    _check_is_ours(folder)
    held = CacheFolder.open(folder, needs_secret=False)
    try:
        yield held
    finally:
        held.close()


# ---- verify and empty ---------------------------------------------------------------------------


def verify(folder: Path) -> Check:
    """Compare all payloads with their digests."""
    check = Check(str(folder))
    start_s = time.monotonic()
    with _held(folder):
        for namespace in _namespaces(folder):
            for path, contents in _segments(namespace):
                if contents is None:
                    check.foreign.append(str(path))
                else:
                    _verify_segment(path, contents, check)
    check.elapsed_s = time.monotonic() - start_s
    return check


def _verify_segment(path: Path, contents: Contents, check: Check) -> None:
    files = Files()
    number, fingerprint = segment_number(path.name), bytes.fromhex(path.parent.name)
    assert number is not None, path
    if contents.is_sealed:
        found = read_segment(files, path, number, fingerprint, by_footer=False)
        if found is None or found.records != contents.records:
            check.damaged.append(f"{path}: headers")
    elif rest := path.stat().st_size - contents.end:
        check.unread.append(f"{path}: {rest}")
    descriptor = files.open_to_read(path)
    try:
        for record in contents.records:
            check.num_records += 1
            check.num_bytes += record.num_bytes
            try:
                payload = read_whole(files, descriptor, record.num_bytes, record.offset)
                is_sound = payload_digest(payload) == record.digest
            except OSError:
                is_sound = False
            if not is_sound:
                check.damaged.append(f"{path}: {record.group}/{record.name.hex()}")
    finally:
        files.close(descriptor)


def empty(folder: Path) -> Removal:
    """Remove all segments and descriptions, and the folders that become empty."""
    removal = Removal(str(folder))
    with _held(folder) as held:
        for namespace in _namespaces(folder):
            for file in segment_files(held.files, namespace).values():
                _remove(file.path, removal)
            if not any(namespace.iterdir()):
                namespace.rmdir()
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if is_namespace(path.stem) and (path.is_file() or path.is_symlink()):
                _remove(path, removal)
    return removal


def _remove(path: Path, removal: Removal) -> None:
    removal.num_bytes += path.lstat().st_size
    removal.num_files += 1
    path.unlink()


ACTIONS: Mapping[str, Callable[[Path], Survey | Check | Removal]] = {
    "inspect": survey,
    "verify": verify,
    "empty": empty,
}
