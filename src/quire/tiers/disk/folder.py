"""The cache folder: its lock, the secret for names, and the namespaces.

    lock                    held while an engine uses the folder; contains its process id
    secret                  16 random bytes, from which names are made
    spent                   bytes written of the daily limit, for the next process
    <fingerprint>/          a namespace: what determines the bytes of blocks, 32 hex digits
        NNNNNNNN.seg        its segments

The tier touches nothing else in the folder: no other names, and no links, pipes or other objects
that have one of these names. Folders have mode 0700 and files 0600.

The processes of one engine's ranks share a folder. Each writes in a namespace of its own. Old
segments, which no rank reads, are divided among the ranks to be counted and removed. So no two
ranks write or remove the same file. The ranks hold one lock: the first rank opens it, and the
processes of the other ranks inherit its descriptor. The lock is free when all ranks have closed it
or have ended.
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
    """The part of a shared folder that belongs to this rank."""

    rank: int = 0
    size: int = 1
    #: The fingerprints of the namespaces of all ranks.
    fingerprints: frozenset[bytes] = frozenset()


class SegmentFile(NamedTuple):
    """A segment file as the folder lists it; its content has not been checked."""

    path: Path
    num_bytes: int
    changed_ns: int


@dataclass(slots=True)
class CacheFolder:
    """A cache folder whose lock this process holds until `close`."""

    path: Path
    files: Files
    #: The secret for names. Empty in processes that make no names, such as the ranks above 0.
    secret: bytes
    _lock: int
    #: This rank's part of the folder. It has to be set before a store is made.
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
        """Make the folder if it does not exist, and lock it.

        A folder without write permission can be opened if it was used before. `wait_s` is the time
        to wait for the lock of another process: a killed process holds it until its last read
        returns. Without `needs_secret`, the secret is neither read nor made.

        Raises ConfigurationError if another process holds the folder, or it can't be used.
        """
        files = files or Files()
        lock = -1
        # First, get the lock, which keeps other processes out.
        try:
            files.make_folder(path)
            lock, is_writable = _open_lock(path, files)
            _acquire_lock(path, files, lock, wait_s)
            _warn_of_others(path, files)
            # Then read or make the secret, and clean up after the previous process.
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
        """The same folder in the process of another rank. `lock` is the inherited descriptor of the
        held lock, which this closes."""
        return cls(path, files or Files(), b"", lock)

    @property
    def lock_descriptor(self) -> int:
        """The descriptor for `join`, in processes that inherit it."""
        return self._lock

    def close(self) -> None:
        """Unlock the folder once all ranks have closed it."""
        self.files.close(self._lock)

    def namespace(self, fingerprint: bytes) -> Path:
        """The path of a namespace, which need not exist. `fingerprint` has 16 bytes."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        return self.path / fingerprint.hex()

    def fingerprints(self) -> list[bytes]:
        """The fingerprints of the namespaces that have a folder. Raises OSError."""
        names = [name for name in self.files.names(self.path) if _NAMESPACE.fullmatch(name)]
        return [bytes.fromhex(name) for name in sorted(names) if self._is_folder(name)]

    def old_segments(self, fingerprint: bytes) -> list[SegmentFile]:
        """This rank's part of the segments of all namespaces that no rank of this engine uses,
        least recently changed first. `fingerprint` names this rank's namespace.

        Raises OSError.
        """
        found = []
        for other in set(self.fingerprints()) - {fingerprint} - self.part.fingerprints:
            segments = segment_files(self.files, self.namespace(other))
            found += [file for number, file in segments.items() if self._has_part(number)]
        return sorted(found, key=lambda old: (old.changed_ns, old.path))

    def remove_if_empty(self, namespace: Path) -> None:
        """Remove the folder of a namespace if it has no files. Raises OSError."""
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
        """This rank's share of the bytes that `write_spent` saved; None if there is no valid
        record."""
        path = self.path / "spent"
        try:
            descriptor = self.files.open_to_read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s can't be read: %s; the daily limit starts afresh", path, error)
            return None
        try:
            content = read_whole(self.files, descriptor, _SPENT.size + 1, 0)
        except OSError as error:
            logger.warning("%s can't be read: %s; the daily limit starts afresh", path, error)
            return None
        finally:
            _close(self.files, descriptor)
        if len(content) == _SPENT.size:
            magic, num_bytes, at_s, digest = _SPENT.unpack(content)
            if magic == _SPENT_MAGIC and digest == xxhash.xxh3_128_digest(content[:-16]):
                return Spent(-(-num_bytes // self.part.size), at_s)
        logger.warning("%s is damaged; the daily limit starts afresh", path)
        return None

    def write_spent(self, spent: Spent) -> None:
        """Save the spent bytes for the next process. All ranks call this alike, and rank 0 writes
        for all. Raises OSError."""
        if self.part.rank > 0:
            return
        num_bytes = spent.num_bytes * self.part.size
        content = _SPENT.pack(_SPENT_MAGIC, num_bytes, spent.at_s, bytes(16))[:-16]
        content += xxhash.xxh3_128_digest(content)
        _replace(self.path, self.files, "spent", content)

    def _remove_leftover(self) -> None:
        """Remove the unfinished file of a process that ended while it wrote `spent`."""
        leftover = self.path / "spent.new"
        if os.path.lexists(leftover):
            with suppress(OSError):  # the disk may be full or failing, but loads still work
                self.files.unlink(leftover)

    def _write_pid(self) -> None:
        try:
            self.files.truncate(self._lock, 0)
            write_whole(self.files, self._lock, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            # The number is for people only. On a full disk loads still work.
            logger.warning("%s: the process id can't be written: %s", self.path / "lock", error)


def segment_files(files: Files, namespace: Path) -> dict[int, SegmentFile]:
    """The segments of a namespace by number, ascending. Segments that another process has just
    removed are left out. Raises OSError."""
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
    """The names in a namespace; none if another process has just removed it."""
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


def _acquire_lock(path: Path, files: Files, lock: int, wait_s: float) -> None:
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
            "%s has mode %03o, so others can write files that quire would take for its cache:"
            " give it mode 700",
            *(path, mode),
        )


def _close(files: Files, descriptor: int) -> None:
    """Close a descriptor and ignore errors: after another error, which is reported, or after the
    last read."""
    if descriptor >= 0:
        with suppress(OSError):
            files.close(descriptor)


def _secret(path: Path, files: Files) -> bytes:
    """Read the folder's secret, or make one. Made atomically, by the process that holds the
    lock."""
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
    """Replace the content of a file atomically. Raises OSError."""
    new = path / f"{name}.new"
    if os.path.lexists(new):  # left by a process that ended while it wrote
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
