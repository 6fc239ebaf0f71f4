"""The disk tier's system calls on files and folders.

All of `quire.tiers.disk` uses one `Files` object, so that tests can pass a subclass whose calls
fail, wait or kill the process. Files get mode 0600 and folders 0700, independent of the umask.
Opening never follows a link and never waits for the other end of a pipe, since other users may have
put links and pipes into the folder.
"""

import ctypes
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.tiers.disk.record import payload_digest

Buffer = memoryview | bytes | bytearray

FILE_MODE, FOLDER_MODE = 0o600, 0o700
MAX_BUFFERS = 1024
"""Maximum number of buffers in one preadv or pwritev: IOV_MAX of Linux."""
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
MAX_GAP_BYTES = 32 << 10
"""Largest gap in bytes between two records that are read by one call. Reading across the gap is
faster than a seek."""


class RecordRun(NamedTuple):
    """n records of one file that lie close together. All arrays have length n."""

    #: Offset of each payload in the file.
    offsets: NDArray[np.int64]
    #: Number of bytes of each payload.
    sizes: NDArray[np.int64]
    #: Digests of the payloads, of 16 bytes each.
    digests: NDArray[Any]
    #: The index of each record's target among the `Targets`.
    indexes: NDArray[np.int64]


# A buffer for the bytes in the gaps between records; its content is never used.
_gap = memoryview(bytearray(MAX_GAP_BYTES))


class Targets(NamedTuple):
    """Parts of a writable memory area that a read fills."""

    #: The whole memory.
    memory: memoryview
    #: Address of the memory's first byte.
    address: int
    #: Offset of each part in the memory in bytes, of shape [n].
    begins: NDArray[np.int64]
    #: Number of bytes of each part, of shape [n].
    sizes: NDArray[np.int64]

    @classmethod
    def in_turn(cls, memory: bytearray, sizes: Sequence[int]) -> "Targets":
        """Adjacent targets of these sizes, from the beginning of the memory."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0
        all_sizes = np.array(sizes, np.int64)
        return cls(memoryview(memory), address, np.cumsum(all_sizes) - all_sizes, all_sizes)

    def view(self, index: int) -> memoryview:
        begin = int(self.begins[index])
        return self.memory[begin : begin + int(self.sizes[index])]


class Files:
    """The system calls. Each method raises the OSError of its call. Descriptors are plain ints."""

    def open_to_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | _OPEN_FLAGS)

    def open_to_write(self, path: Path) -> int:
        """Open an existing file for reading and writing."""
        return os.open(path, os.O_RDWR | _OPEN_FLAGS)

    def create(self, path: Path) -> int:
        """Create a file. Raises FileExistsError if it exists."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)  # the umask may have removed bits
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in turn. Returns the number of bytes read, which is smaller at the end
        of the file."""
        return os.preadv(descriptor, buffers, offset)

    def read_records(
        self, descriptor: int, records: RecordRun, targets: Targets
    ) -> NDArray[np.bool_]:
        """Read records into their targets. Returns [n] bools: True if a record was read completely
        and has the right digest.

        Uses as few calls of `preadv` as possible. Raises OSError.
        """
        are_sound: list[bool] = []
        rows = list(zip(*[column.tolist() for column in records], strict=True))
        for first in range(0, len(rows), MAX_BUFFERS // 2):
            part = rows[first : first + MAX_BUFFERS // 2]
            end = self._read_in_turn(descriptor, part, targets)
            # Also check that the read reached the end of the target. A target that was not filled
            # may hold old bytes with the right digest.
            are_sound += [
                begin + num_bytes <= end and payload_digest(targets.view(index)) == digest
                for begin, num_bytes, digest, index in part
            ]
        return np.array(are_sound)

    def _read_in_turn(
        self, descriptor: int, rows: Sequence[tuple[int, int, bytes, int]], targets: Targets
    ) -> int:
        """Fill the targets of records by calls of `preadv`. Returns the file offset after the last
        byte read."""
        buffers: list[memoryview] = []
        offset = end = rows[0][0]
        for begin, num_bytes, _, index in rows:
            if begin > end:
                buffers.append(_gap[: begin - end])
            buffers.append(targets.view(index))
            end = begin + num_bytes
        while offset < end:
            came = self.preadv(descriptor, buffers, offset)
            if came == 0:  # the file ends here
                break
            offset += came
            if offset < end:
                buffers = after(buffers, came)
        return offset

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write the buffers one after the other. Returns the number of bytes written."""
        return os.pwritev(descriptor, buffers, offset)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)

    def sync_data(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make created, renamed and removed names in a folder durable (fsync)."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents. Existing folders are not changed."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            try:
                os.mkdir(each, FOLDER_MODE)
            except FileExistsError:
                if not each.is_dir():  # if it is a folder, another process made it first
                    raise
            else:
                os.chmod(each, FOLDER_MODE)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def rename(self, path: Path, new: Path) -> None:
        os.rename(path, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def status(self, path: Path) -> os.stat_result:
        """The status of a path. A link is not followed."""
        return os.stat(path, follow_symlinks=False)

    def exists(self, path: Path) -> bool:
        """True if the path exists, even as a dangling link."""
        return os.path.lexists(path)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def lock(self, descriptor: int) -> None:
        """Lock a file until it is closed. Raises BlockingIOError if another process has locked it.

        The kernel releases the lock when the process ends, even by a kill.
        """
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_whole(files: Files, descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read `num_bytes` bytes from `offset` on, or fewer if the file is shorter."""
    content = bytearray(num_bytes)
    view, filled = memoryview(content), 0
    while filled < num_bytes:
        came = files.preadv(descriptor, [view[filled:]], offset + filled)
        if came == 0:
            break
        filled += came
    view.release()
    return bytes(content[:filled])


def write_whole(files: Files, descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all buffers, even if a call writes only a part of them. After an OSError, any part may
    have been written."""
    waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while waiting:
        written = files.pwritev(descriptor, waiting[:MAX_BUFFERS], offset)
        offset += written
        waiting = after(waiting, written)


def after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The buffers without their first `num_bytes` bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
