"""The cache folder: its lock, the secret for names, and the namespaces.

    lock                    locked while an engine uses the folder; contains its process id
    secret                  16 random bytes, used to compute the names of contents
    spent                   bytes used of the daily write limit, for the next process
    <fingerprint>/          a namespace; its name is the fingerprint of its blocks, 32 hex digits
        NNNNNNNN.seg        its segments, which are files of records

The tier touches no other names in the folder, and no links, pipes or other special files that have
one of these names. Folders have mode 0700 and files 0600.

All ranks of an engine share a folder. Each rank writes to its own namespace. Old segments, in
namespaces that no rank uses, are divided among the ranks, each of which counts and removes its
part. So no two ranks write or remove the same file. The ranks hold one lock: the first rank opens
it, and the processes of the other ranks inherit its descriptor. The lock is free when all ranks
have closed it or have ended.
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
    """Which part of a shared folder belongs to this rank."""

    rank: int = 0
    size: int = 1
    #: The fingerprints of all ranks' namespaces.
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
    #: The secret for names of contents. Empty in processes that don't compute names, such as
    #: ranks above 0.
    secret: bytes
    _lock: int
    #: This rank's part of the folder. It has to be set before a `SegmentStore` is made.
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

        A read-only folder can be opened if it was used before. `wait_s` is the time to wait while
        another process holds the lock: a killed process holds it until its last read returns.
        Without `needs_secret`, the secret is neither read nor made.

        Raises ConfigurationError if another process holds the folder, or it can't be used.
        """
        files = files or Files()
        lock = -1
        # First, acquire the lock, which excludes other processes.
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
                logger.warning("%s is read-only: blocks are loaded from it, but not stored", path)
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
        """The folder in the process of another rank. `lock` is the inherited descriptor of the lock
        that rank 0 holds; `close` closes it."""
        return cls(path, files or Files(), b"", lock)

    @property
    def lock_descriptor(self) -> int:
        """The lock's descriptor, which a process that inherits it passes to `join`."""
        return self._lock

    def close(self) -> None:
        """Close the lock's descriptor. The folder is unlocked when all ranks have closed it."""
        self.files.close(self._lock)

    def namespace(self, fingerprint: bytes) -> Path:
        """The path of a namespace, which may not exist yet. `fingerprint` has 16 bytes."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        return self.path / fingerprint.hex()

    def fingerprints(self) -> list[bytes]:
        """The fingerprints of all namespaces in the folder. Raises OSError."""
        names = [name for name in self.files.names(self.path) if _NAMESPACE.fullmatch(name)]
        return [bytes.fromhex(name) for name in sorted(names) if self._is_folder(name)]

    def old_segments(self, fingerprint: bytes) -> list[SegmentFile]:
        """Segments in namespaces that no rank of this engine uses, least recently changed first.
        Each rank gets a separate part of them. `fingerprint` names this rank's namespace.

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
            with suppress(FileNotFoundError):  # another rank removed it first
                self.files.remove_folder(namespace)

    def _has_part(self, number: int) -> bool:
        return number % self.part.size == self.part.rank

    def _is_folder(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(self.files.status(self.path / name).st_mode)
        except FileNotFoundError:  # another rank has just removed it
            return False

    def read_spent(self) -> Spent | None:
        """The spent bytes that `write_spent` saved, divided by the number of ranks; None if there
        is no valid file."""
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
        """Save the spent bytes for the next process. In ranks above 0 it does nothing; rank 0 saves
        its own bytes times the number of ranks. Raises OSError."""
        if self.part.rank > 0:
            return
        num_bytes = spent.num_bytes * self.part.size
        content = _SPENT.pack(_SPENT_MAGIC, num_bytes, spent.at_s, bytes(16))[:-16]
        content += xxhash.xxh3_128_digest(content)
        _replace(self.path, self.files, "spent", content)

    def _remove_leftover(self) -> None:
        """Remove `spent.new`, left by a process that ended while it wrote `spent`."""
        leftover = self.path / "spent.new"
        if os.path.lexists(leftover):
            with suppress(OSError):  # the disk may be full or failing, but loads still work
                self.files.unlink(leftover)

    def _write_pid(self) -> None:
        try:
            self.files.truncate(self._lock, 0)
            write_whole(self.files, self._lock, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            # The process id is only for the operator. On a full disk, loads still work.
            logger.warning("%s: the process id can't be written: %s", self.path / "lock", error)


def segment_files(files: Files, namespace: Path) -> dict[int, SegmentFile]:
    """The segment files of a namespace by number, in ascending order, without those that another
    process has just removed. Raises OSError."""
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
    """The file names in a namespace; empty if another process has just removed the namespace."""
    try:
        return files.names(namespace)
    except FileNotFoundError:
        return []


def _open_lock(path: Path, files: Files) -> tuple[int, bool]:
    """Open the lock file. Returns its descriptor, and True if the file is writable."""
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
    except FileExistsError:  # another process created it first
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
                    f"cache_dir {str(path)!r} is in use by process {holder}; a cache folder"
                    " serves one engine at a time, so give each engine its own folder"
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
    """Close a descriptor if it is not -1. Ignores errors: the caller reports an earlier error, or
    has only read the file."""
    if descriptor >= 0:
        with suppress(OSError):
            files.close(descriptor)


def _secret(path: Path, files: Files) -> bytes:
    """Read the folder's secret, or make a new one atomically. The caller holds the lock."""
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
            "%s is damaged: a new secret is made, so blocks cached earlier are not found again",
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
