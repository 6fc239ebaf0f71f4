"""The system calls with which the disk tier touches files, and no others.

All of `quire.tiers.disk` goes through one `Files`, so that a subclass can fail, delay or end any
call: that is how the tests kill the tier between two calls. A file is made with mode 0600 and a
folder with 0700, whatever the process' umask is. What is opened is never what a link points to, and
opening never waits for the other end of a pipe: such things may lie in a folder, but are not ours.
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
"""Of one preadv or pwritev; IOV_MAX of Linux."""
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
MAX_GAP_BYTES = 32 << 10
"""Between two records that one call reads: less than what a disk reads while it seeks."""


class RecordRun(NamedTuple):
    """Records of one file that lie close together, by their offsets; of the payload of each its
    offset, its bytes, its digest, and the number of its target. All [n]; digests have 16 bytes."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    digests: NDArray[Any]
    indexes: NDArray[np.int64]


_gap = memoryview(bytearray(MAX_GAP_BYTES))  # what is read between records: never looked at


class Targets(NamedTuple):
    """Parts of a writable memory that are to be filled, each with its begin and its bytes.

    address: of the memory's first byte. begins, sizes: [n].
    """

    memory: memoryview
    address: int
    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def in_turn(cls, memory: bytearray, sizes: Sequence[int]) -> "Targets":
        """One behind the other, from the memory's begin."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0
        all_sizes = np.array(sizes, np.int64)
        return cls(memoryview(memory), address, np.cumsum(all_sizes) - all_sizes, all_sizes)

    def view(self, index: int) -> memoryview:
        begin = int(self.begins[index])
        return self.memory[begin : begin + int(self.sizes[index])]


class Files:
    """Calls of the system. Each raises OSError as the call does; descriptors are plain ints."""

    def open_to_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | _OPEN_FLAGS)

    def open_to_write(self, path: Path) -> int:
        """A file that exists."""
        return os.open(path, os.O_RDWR | _OPEN_FLAGS)

    def create(self, path: Path) -> int:
        """A new file; FileExistsError if there is one."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)  # the umask may have taken bits away
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in turn; returns how many bytes came, fewer at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def read_records(
        self, descriptor: int, records: RecordRun, targets: Targets
    ) -> NDArray[np.bool_]:
        """Fill the targets; which of the records came, with all bytes and the right digest.

        Here by as few `preadv` as it takes. Raises OSError.
        """
        are_sound: list[bool] = []
        rows = list(zip(*[column.tolist() for column in records], strict=True))
        for first in range(0, len(rows), MAX_BUFFERS // 2):
            part = rows[first : first + MAX_BUFFERS // 2]
            end = self._read_in_turn(descriptor, part, targets)
            # What did not come is not there, whatever the memory held before.
            are_sound += [
                begin + num_bytes <= end and payload_digest(targets.view(index)) == digest
                for begin, num_bytes, digest, index in part
            ]
        return np.array(are_sound)

    def _read_in_turn(
        self, descriptor: int, rows: Sequence[tuple[int, int, bytes, int]], targets: Targets
    ) -> int:
        """Fill the targets of records by calls of `preadv`; returns where what came ends."""
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
        """Write the buffers one after the other; returns how many bytes were written."""
        return os.pwritev(descriptor, buffers, offset)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)

    def sync_data(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """With those above it, as far as they are missing; none that is there is changed."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            try:
                os.mkdir(each, FOLDER_MODE)
            except FileExistsError:
                if not each.is_dir():  # else another process was faster
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
        """Of a link, its own."""
        return os.stat(path, follow_symlinks=False)

    def exists(self, path: Path) -> bool:
        """Whether anything has this name."""
        return os.path.lexists(path)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def lock(self, descriptor: int) -> None:
        """Keep others from locking this file until it is closed; BlockingIOError if it is locked.

        The lock ends with the process, however that ends.
        """
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_whole(files: Files, descriptor: int, num_bytes: int, offset: int) -> bytes:
    """`num_bytes` from `offset`, or fewer where the file ends before."""
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
    """Write all buffers, however few bytes each call takes. OSError: any part may be written."""
    waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while waiting:
        written = files.pwritev(descriptor, waiting[:MAX_BUFFERS], offset)
        offset += written
        waiting = after(waiting, written)


def after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers behind their first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
