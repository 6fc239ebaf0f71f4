"""Files that fail, stop, fall short or wait where a test says so."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quire.tiers.disk.files import Buffer, Files, RecordRun, Targets
from quire.tiers.disk.native_files import NativeFiles


class KilledError(BaseException):
    """The process ends here: nothing that follows has an effect on the disk."""


class FaultyFiles(Files):
    """The real calls, counted; each may be preceded by a fault.

    kill_at: the number of the call (from 1) before which the process ends; a write ends in its
        middle. errors: name of a call -> what it raises instead. most_bytes: that a read or write
        moves at once. gate: what reads wait for. after: called after each call.
    """

    native: ClassVar[NativeFiles | None] = None
    """What reads records, in the tests of `each_reader`; None: `Files` does."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.calls: Counter[str] = Counter()
        self.kill_at: int | None = None
        self.is_dead = False
        self.errors: dict[str, OSError] = {}
        self.fails_when: Callable[[str, tuple[Any, ...]], OSError | None] = lambda name, given: None
        self.most_bytes: int | None = None
        self.gate: threading.Event | None = None
        self.num_at_gate = 0  # reads that have come there, so far
        self.write_gate: threading.Event | None = None
        self.after: Callable[[], None] = lambda: None
        self._opened: set[int] = set()

    def release(self) -> None:
        """Close what a killed process would have left to the system."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()

    def before(self, name: str, given: tuple[Any, ...]) -> None:
        if self.is_dead:
            raise KilledError(name)
        self.num_calls += 1
        self.calls[name] += 1
        if self.num_calls == self.kill_at:
            self.is_dead = True
            if name == "pwritev":
                descriptor, buffers, offset = given
                whole = b"".join(bytes(buffer) for buffer in buffers)
                os.pwrite(descriptor, whole[: len(whole) // 2], offset)
            raise KilledError(name)
        error = self.errors.get(name) or self.fails_when(name, given)
        if error is not None:
            raise error

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass_gate()
        if self.most_bytes is not None:
            buffers = [buffers[0][: self.most_bytes]]
        return super().preadv(descriptor, buffers, offset)

    def read_records(
        self, descriptor: int, records: RecordRun, targets: Targets
    ) -> NDArray[np.bool_]:
        """A native read is one that `preadv` would be told of, with the faults of that."""
        if self.native is None or self.most_bytes is not None:
            return super().read_records(descriptor, records, targets)
        views = [targets.view(index) for index in records.indexes]
        self.before("preadv", (descriptor, views, int(records.offsets[0])))
        self._pass_gate()
        return self.native.read_records(descriptor, records, targets)

    def _pass_gate(self) -> None:
        gate = self.gate
        if gate is not None:
            self.num_at_gate += 1
            gate.wait()

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.write_gate is not None:
            self.write_gate.wait()
        if self.most_bytes is not None:
            buffers = [memoryview(buffers[0])[: self.most_bytes]]
        return super().pwritev(descriptor, buffers, offset)

    def sync_data(self, descriptor: int) -> None:
        """Not carried out: what was written survives the process without, and it takes long."""

    def sync_folder(self, path: Path) -> None:
        """As `sync_data`."""


def _counted(name: str, own: Callable[..., Any], files: FaultyFiles, *given: Any) -> Any:
    files.before(name, given)
    result = own(files, *given)
    if name.startswith("open") or name == "create":
        files._opened.add(result)
    elif name == "close":
        files._opened.discard(given[0])
    files.after()
    return result


def _method(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda files, *given: partial(_counted, name, own)(files, *given)


for _name in [name for name in vars(Files) if not name.startswith("_") and name != "read_records"]:
    setattr(FaultyFiles, _name, _method(_name, getattr(FaultyFiles, _name)))


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_disk() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def read_only() -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS))


def disk_bytes(folder: Path) -> int:
    """What all segments below a folder take."""
    return sum(path.lstat().st_size for path in folder.rglob("*.seg"))
