"""The cache folder: its lock, the installation's secret, and the namespaces in it.

    lock                    held while an engine uses the folder; holds its process id
    secret                  16 random bytes, with which names are made
    <fingerprint>/          a namespace: what determines the bytes of blocks, 32 hex digits
        NNNNNNNN.seg        its segments

Other names are left alone. Folders have mode 0700 and files 0600.
"""

import errno
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.tiers.disk.files import Files, read_whole, write_whole
from quire.tiers.disk.segment import segment_number

FINGERPRINT_BYTES = 16
SECRET_BYTES = 16
LOCK_STEP_S = 0.05

_NAMESPACE = re.compile("[0-9a-f]{32}")
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

logger = get_logger(__name__)


class OldSegment(NamedTuple):
    """A segment that nothing is read from: of another namespace, or of none."""

    path: Path
    num_bytes: int
    changed_ns: int


@dataclass(slots=True)
class CacheFolder:
    """A folder that this process holds the lock of, until `close`."""

    path: Path
    files: Files
    secret: bytes
    _lock: int

    @classmethod
    def open(cls, path: Path, files: Files | None = None, wait_s: float = 0.0) -> "CacheFolder":
        """Make the folder if there is none, and lock it.

        A folder that can't be written to, but has been used before, can be opened. wait_s: for
        another process to let go of it: one that was killed holds it until its last read returns.

        Raises ConfigurationError where another process holds it, or where it can't be had.
        """
        files = files or Files()
        lock = -1
        try:
            files.make_folder(path)
            lock = _open_lock(path, files)
            _take_lock(path, files, lock, wait_s)
            folder = cls(path, files, _secret(path, files), lock)
            folder._write_pid()
        except OSError as error:
            _close(files, lock)
            raise ConfigurationError(
                f"cache_dir {str(path)!r} can't be used: {error.strerror or error}"
            ) from error
        except ConfigurationError:
            _close(files, lock)
            raise
        return folder

    def close(self) -> None:
        """Let others have the folder."""
        self.files.close(self._lock)

    def namespace(self, fingerprint: bytes) -> Path:
        """The folder of a namespace, which need not exist. fingerprint: 16 bytes."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        return self.path / fingerprint.hex()

    def fingerprints(self) -> list[bytes]:
        """Of the namespaces that have a folder. Raises OSError."""
        names = sorted(self.files.names(self.path))
        return [bytes.fromhex(name) for name in names if _NAMESPACE.fullmatch(name)]

    def old_segments(self, fingerprint: bytes) -> list[OldSegment]:
        """The segments of all namespaces but one, by the time of their last change.

        Raises OSError.
        """
        found = []
        for other in self.fingerprints():
            if other != fingerprint:
                folder = self.namespace(other)
                found += [
                    old_segment(self.files, folder / each)
                    for each in self.files.names(folder)
                    if segment_number(each) is not None
                ]
        return sorted(found, key=lambda old: old.changed_ns)

    def _write_pid(self) -> None:
        try:
            self.files.truncate(self._lock, 0)
            write_whole(self.files, self._lock, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:
            # The number is for people only. On a full disk loads still work.
            logger.warning("%s: the process id can't be written: %s", self.path / "lock", error)


def old_segment(files: Files, path: Path) -> OldSegment:
    status = files.status(path)
    return OldSegment(path, status.st_size, status.st_mtime_ns)


def _open_lock(path: Path, files: Files) -> int:
    try:
        return files.open_to_write(path / "lock")
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return files.open_to_read(path / "lock")
    try:
        return files.create(path / "lock")
    except FileExistsError:  # another process was faster
        return files.open_to_write(path / "lock")


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


def _close(files: Files, descriptor: int) -> None:
    """After an error, which is the one to be reported."""
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
    new = path / "secret.new"
    if new.exists():  # of a process that ended while it wrote
        files.unlink(new)
    secret = secrets.token_bytes(SECRET_BYTES)
    descriptor = files.create(new)
    try:
        write_whole(files, descriptor, [secret], 0)
        files.sync_data(descriptor)
    except OSError:
        files.close(descriptor)
        files.unlink(new)
        raise
    files.close(descriptor)
    files.rename(new, path / "secret")
    files.sync_folder(path)
    return secret
