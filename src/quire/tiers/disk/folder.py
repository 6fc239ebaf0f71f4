"""The cache folder: its lock, the installation's secret, and the namespaces in it.

    lock                    held while an engine uses the folder; holds its process id
    secret                  16 random bytes, with which names are made
    spent                   what was written of a day's bytes, for the next process
    <fingerprint>/          a namespace: what determines the bytes of blocks, 32 hex digits
        NNNNNNNN.seg        its segments

Other names are left alone, and so are links, pipes and whatever else has one of these names but is
no plain file or folder. Folders have mode 0700 and files 0600.

The processes of one engine's ranks use a folder together. Each writes in a namespace of its own,
and of the segments that nobody reads any more, each has its part to count and to remove: so no two
of them ever write or remove the same file. They hold one lock, whose descriptor the first has given
to the others: it is free when all of them have closed it, or have ended.
"""

import errno
import os
import re
import secrets
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.tiers.disk.files import Files, read_whole, write_whole
from quire.tiers.disk.io_limits import Spent
from quire.tiers.disk.segment import segment_number, segment_path

FINGERPRINT_BYTES = 16
SECRET_BYTES = 16
LOCK_STEP_S = 0.05

_SPENT = struct.Struct("<8sQd16s")
_SPENT_MAGIC = b"QUIRESPD"
_NAMESPACE = re.compile("[0-9a-f]{32}")
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RankPart:
    """Which of the processes that use a folder together this is, and what they write in.

    fingerprints: of the namespaces of all of them.
    """

    rank: int = 0
    size: int = 1
    fingerprints: frozenset[bytes] = frozenset()


class SegmentFile(NamedTuple):
    """A segment as the folder lists it, whatever is in it."""

    path: Path
    num_bytes: int
    changed_ns: int


@dataclass(slots=True)
class CacheFolder:
    """A folder that this process holds the lock of, until `close`.

    secret: empty where nothing is named, as in ranks beyond the first. part: all of it, unless it
    is set before a store is made.
    """

    path: Path
    files: Files
    secret: bytes
    _lock: int
    part: RankPart = field(default_factory=RankPart)

    @classmethod
    def open(
        cls,
        path: Path,
        files: Files | None = None,
        wait_s: float = 0.0,
        *,
        needs_secret: bool = True,
    ) -> "CacheFolder":
        """Make the folder if there is none, and lock it.

        A folder that can't be written to, but has been used before, can be opened. wait_s: for
        another process to let go of it: one that was killed holds it until its last read returns.
        needs_secret: else it is neither read nor made, for who names nothing.

        Raises ConfigurationError where another process holds it, or where it can't be had.
        """
        files = files or Files()
        lock = -1
        try:
            files.make_folder(path)
            lock, is_writable = _open_lock(path, files)
            _take_lock(path, files, lock, wait_s)
            _warn_of_others(path, files)
            folder = cls(path, files, _secret(path, files) if needs_secret else b"", lock)
            if is_writable:
                folder._write_pid()
                folder._remove_leftover()
            else:
                logger.warning("%s is read-only: blocks are loaded from it, none are stored", path)
        except OSError as error:
            _close(files, lock)
            raise ConfigurationError(
                f"cache_dir {str(path)!r} can't be used: {error.strerror or error}"
            ) from error
        except ConfigurationError:
            _close(files, lock)
            raise
        return folder

    @classmethod
    def join(cls, path: Path, lock: int, files: Files | None = None) -> "CacheFolder":
        """The same folder in the process of another rank. lock: a descriptor of the lock that is
        held, inherited; this closes it."""
        return cls(path, files or Files(), b"", lock)

    @property
    def lock_descriptor(self) -> int:
        """For `join`, in processes that inherit it."""
        return self._lock

    def close(self) -> None:
        """Let others have the folder, once all ranks have done so."""
        self.files.close(self._lock)

    def namespace(self, fingerprint: bytes) -> Path:
        """The folder of a namespace, which need not exist. fingerprint: 16 bytes."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        return self.path / fingerprint.hex()

    def fingerprints(self) -> list[bytes]:
        """Of the namespaces that have a folder. Raises OSError."""
        names = [name for name in self.files.names(self.path) if _NAMESPACE.fullmatch(name)]
        return [bytes.fromhex(name) for name in sorted(names) if self._is_folder(name)]

    def old_segments(self, fingerprint: bytes) -> list[SegmentFile]:
        """The segments of all namespaces but one, and those of other ranks, by the time of their
        last change; of several ranks each has its own part of them.

        Raises OSError.
        """
        found = []
        for other in set(self.fingerprints()) - {fingerprint} - self.part.fingerprints:
            segments = segment_files(self.files, self.namespace(other))
            found += [file for number, file in segments.items() if self._has_part(number)]
        return sorted(found, key=lambda old: (old.changed_ns, old.path))

    def remove_if_empty(self, namespace: Path) -> None:
        """Raises OSError."""
        if not _names(self.files, namespace):
            with suppress(FileNotFoundError):  # another rank was faster
                self.files.remove_folder(namespace)

    def _has_part(self, number: int) -> bool:
        return number % self.part.size == self.part.rank

    def _is_folder(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(self.files.status(self.path / name).st_mode)
        except FileNotFoundError:  # another rank has just removed it
            return False

    def read_spent(self) -> Spent | None:
        """What was kept by `write_spent`, a rank's share of it; None: nothing, or nothing that can
        be trusted."""
        path = self.path / "spent"
        try:
            descriptor = self.files.open_to_read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s can't be read: %s; the day's bytes begin anew", path, error)
            return None
        try:
            content = read_whole(self.files, descriptor, _SPENT.size + 1, 0)
        except OSError as error:
            logger.warning("%s can't be read: %s; the day's bytes begin anew", path, error)
            return None
        finally:
            _close(self.files, descriptor)
        if len(content) == _SPENT.size:
            magic, num_bytes, at_s, digest = _SPENT.unpack(content)
            if magic == _SPENT_MAGIC and digest == xxhash.xxh3_128_digest(content[:-16]):
                return Spent(-(-num_bytes // self.part.size), at_s)
        logger.warning("%s is damaged; the day's bytes begin anew", path)
        return None

    def write_spent(self, spent: Spent) -> None:
        """Keep it for the next process; of several ranks, which write alike, the first one does
        so for all. Raises OSError."""
        if self.part.rank > 0:
            return
        num_bytes = spent.num_bytes * self.part.size
        content = _SPENT.pack(_SPENT_MAGIC, num_bytes, spent.at_s, bytes(16))[:-16]
        content += xxhash.xxh3_128_digest(content)
        _replace(self.path, self.files, "spent", content)

    def _remove_leftover(self) -> None:
        """Of a process that ended while it wrote what it had spent."""
        leftover = self.path / "spent.new"
        if os.path.lexists(leftover):
            with suppress(OSError):  # the disk may be full or failing; loads still work
                self.files.unlink(leftover)

    def _write_pid(self) -> None:
        try:
            self.files.truncate(self._lock, 0)
            write_whole(self.files, self._lock, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            # The number is for people only. On a full disk loads still work.
            logger.warning("%s: the process id can't be written: %s", self.path / "lock", error)


def segment_files(files: Files, namespace: Path) -> dict[int, SegmentFile]:
    """The segments of a namespace by their numbers, ascending; without those that another process
    has just removed. Raises OSError."""
    numbers = [segment_number(name) for name in _names(files, namespace)]
    found = {}
    for number in sorted(number for number in numbers if number is not None):
        path = segment_path(namespace, number)
        try:
            status = files.status(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            found[number] = SegmentFile(path, status.st_size, status.st_mtime_ns)
    return found


def _names(files: Files, namespace: Path) -> list[str]:
    """None are left where another process has just removed it with the last of its segments."""
    try:
        return files.names(namespace)
    except FileNotFoundError:
        return []


def _open_lock(path: Path, files: Files) -> tuple[int, bool]:
    """The lock's descriptor, and whether it can be written to."""
    try:
        return files.open_to_write(path / "lock"), True
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return files.open_to_read(path / "lock"), False
    try:
        return files.create(path / "lock"), True
    except FileExistsError:  # another process was faster
        return files.open_to_write(path / "lock"), True


def _take_lock(path: Path, files: Files, lock: int, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    has_waited = False
    while True:
        try:
            files.lock(lock)
            return
        except BlockingIOError:
            holder = read_whole(files, lock, 32, 0).decode("ascii", "replace").strip()
            holder = holder or "(unknown)"
            if time.monotonic() >= until_s:
                raise ConfigurationError(
                    f"cache_dir {str(path)!r} is in use by process {holder}; one engine uses a"
                    " cache folder at a time, give each a folder of its own"
                ) from None
            if not has_waited:
                logger.info("%s: waiting for process %s, up to %g s", path, holder, wait_s)
                has_waited = True
            time.sleep(LOCK_STEP_S)


def _warn_of_others(path: Path, files: Files) -> None:
    mode = stat.S_IMODE(files.status(path.resolve()).st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "%s has mode %03o, so others can write there what is then taken for cached: give it"
            " mode 700",
            *(path, mode),
        )


def _close(files: Files, descriptor: int) -> None:
    """After an error, which is the one to be reported, or after all was read."""
    if descriptor >= 0:
        with suppress(OSError):
            files.close(descriptor)


def _secret(path: Path, files: Files) -> bytes:
    """The folder's secret; made whole or not at all, by the process that holds the lock."""
    secret = b""
    try:
        descriptor = files.open_to_read(path / "secret")
    except FileNotFoundError:
        pass
    else:
        try:
            secret = read_whole(files, descriptor, SECRET_BYTES + 1, 0)
        finally:
            files.close(descriptor)
        if len(secret) == SECRET_BYTES:
            return secret
        logger.warning(
            "%s is damaged: a new one is made, and what was cached is not found again",
            path / "secret",
        )
    return _make_secret(path, files)


def _make_secret(path: Path, files: Files) -> bytes:
    secret = secrets.token_bytes(SECRET_BYTES)
    _replace(path, files, "secret", secret)
    return secret


def _replace(path: Path, files: Files, name: str, content: bytes) -> None:
    """Give a file this content, or leave it as it was. Raises OSError."""
    new = path / f"{name}.new"
    if os.path.lexists(new):  # of a process that ended while it wrote
        files.unlink(new)
    descriptor = files.create(new)
    try:
        write_whole(files, descriptor, [content], 0)
        files.sync_data(descriptor)
    except OSError:
        files.close(descriptor)
        files.unlink(new)
        raise
    files.close(descriptor)
    files.rename(new, path / name)
    files.sync_folder(path)
