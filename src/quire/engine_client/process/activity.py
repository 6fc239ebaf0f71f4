"""Record of the engine process's activity, readable after its death.

The API server and the engine share a piece of memory. The engine writes its next activity there
(handling a message, planning, running a step), without a system call. After any death of the
process, even by kill -9, the record tells the API server whose step was running. Made by `link`,
written by `engine_process`, judged by `recovery`.
"""

import mmap
import os
import struct
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

import msgspec

from quire.child_process import unnamed_file

NUM_BYTES = 256 << 10
"""Size of the shared memory; pages that are not written take no memory. It holds the ids of some
thousand requests. If the ids don't fit, the record stands for all requests of the process."""

_HEAD = struct.Struct("=II")  # the activity, and the length of the request ids that follow
_ALL = 0xFFFF_FFFF  # as a length: no ids follow; stands for all requests

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[str]] = msgspec.msgpack.Decoder(list[str])


class Doing(IntEnum):
    """Activities of an engine process. LOADING is the activity until the first record is
    written."""

    LOADING = 0  # not ready for requests yet
    IDLE = 1  # without work, waiting for messages
    TAKING_IN = 2  # adding a new request, or ending a request
    PLANNING = 3  # choosing the work of the next step from all requests
    COMPUTING = 4  # a step, up to the next record, even while its results are sent


class Activity(NamedTuple):
    """An activity and its requests."""

    doing: Doing
    #: Ids of the requests being added or computed; None means all requests of the process.
    request_ids: frozenset[str] | None = frozenset()

    def concerns(self, request_id: str) -> bool:
        """Whether the process may have been working on this request when it died, given that it had
        the request."""
        return self.request_ids is None or request_id in self.request_ids

    def names_others(self, request_id: str) -> bool:
        """Whether the process is known to have worked on another request, too."""
        return self.request_ids is not None and not self.request_ids <= {request_id}


def make_shared_memory() -> int:
    """A descriptor of zeroed memory without a path. The caller has to close it."""
    fd = unnamed_file("quire-activity")
    os.truncate(fd, NUM_BYTES)
    return fd


class ActivityRecord:
    """The shared memory, used by both sides. Invariant: only the engine's side writes."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` comes from `make_shared_memory`, and may be closed afterwards. With None, the memory
        is private to this process. Raises OSError, ValueError."""
        self._memory = mmap.mmap(-1 if fd is None else fd, NUM_BYTES)
        #: The last record of a step, for steps with the same requests.
        self._computed = _HEAD.pack(Doing.COMPUTING, _ALL)

    # ---- the engine's side ------------------------------------------------------------------

    def idle(self) -> None:
        """Record that there is no work until a message comes."""
        self._memory[: _HEAD.size] = _HEAD.pack(Doing.IDLE, 0)

    def record_request(self, request_id: str) -> None:
        """Record that a message about this request is handled."""
        self._write(_record(Doing.TAKING_IN, [request_id]))

    def plan(self) -> None:
        """Record that the engine chooses the work of the next step."""
        self._memory[: _HEAD.size] = _HEAD.pack(Doing.PLANNING, _ALL)

    def compute(self, request_ids: Collection[str] | None) -> None:
        """Record that a step is about to run. `request_ids` are those of all steps in flight,
        including this step; None repeats the ids of the last call."""
        if request_ids is not None:
            self._computed = _record(Doing.COMPUTING, request_ids)
        self._write(self._computed)

    def _write(self, record: bytes) -> None:
        self._memory[: len(record)] = record

    # ---- the API server's side -------------------------------------------------------------------

    def read(self) -> Activity:
        """The last record. Never raises, even if a broken process wrote invalid data."""
        number, length = _HEAD.unpack(self._memory[: _HEAD.size])
        try:
            doing = Doing(number)
            if length == _ALL:
                return Activity(doing, None)
            ids = self._memory[_HEAD.size : _HEAD.size + length]
            return Activity(doing, frozenset(_decoder.decode(ids)) if ids else frozenset())
        except (ValueError, msgspec.DecodeError):
            return Activity(Doing.COMPUTING, None)


def _record(doing: Doing, request_ids: Collection[str]) -> bytes:
    ids = _encoder.encode(list(request_ids))
    if _HEAD.size + len(ids) > NUM_BYTES:
        return _HEAD.pack(doing, _ALL)
    return _HEAD.pack(doing, len(ids)) + ids
