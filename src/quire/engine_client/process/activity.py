"""Record of the engine process's activity, readable after its death.

The API server and the engine share a piece of memory. The engine writes its next activity there
(handling a message, planning, running a step), without a system call. After any death of the
process, even by kill -9, the record tells the API server whose step was running. While the process
lives, the number of records shows that it makes progress. Made by `link`, written by
`engine_process`, judged by `recovery`.
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

# The number of records, the predicted seconds, the activity, and the length of the request ids that
# follow.
_HEAD = struct.Struct("=QdII")
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


class Pace(NamedTuple):
    """The progress of a process, and the predicted time until its next record."""

    #: Number of records that the process has written. While it grows, the process makes progress.
    num_records: int
    #: Predicted seconds of the steps in flight when the last step began; 0 if no time is known, or
    #: if the process has been idle since.
    predicted_s: float


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
        #: The encoded ids of the last step, for steps with the same requests; None stands for all.
        self._step_ids: bytes | None = None
        #: The ids in the memory after the head.
        self._written_ids = b""
        self._num_records = 0
        self._predicted_s = 0.0

    # ---- the engine's side ------------------------------------------------------------------

    def idle(self) -> None:
        """Record that there is no work until a message comes."""
        self._predicted_s = 0.0
        self._write(Doing.IDLE, b"")

    def record_request(self, request_id: str) -> None:
        """Record that a message about this request is handled."""
        self._write(Doing.TAKING_IN, _encoded([request_id]))

    def plan(self) -> None:
        """Record that the engine chooses the work of the next step."""
        self._write(Doing.PLANNING, None)

    def compute(self, request_ids: Collection[str] | None, predicted_s: float) -> None:
        """Record that a step is about to run.

        `request_ids` are those of all steps in flight, including this step; None repeats the ids of
        the last call. `predicted_s` is the predicted time of these steps in seconds; 0 if unknown.
        """
        if request_ids is not None:
            self._step_ids = _encoded(request_ids)
        self._predicted_s = predicted_s
        self._write(Doing.COMPUTING, self._step_ids)

    def _write(self, doing: Doing, ids: bytes | None) -> None:
        """Write a record. ids: None for all requests."""
        self._num_records += 1
        length = _ALL if ids is None else len(ids)
        if ids and ids is not self._written_ids:
            # If the process dies while it writes the ids, the record stands for all requests.
            _HEAD.pack_into(self._memory, 0, self._num_records, self._predicted_s, doing, _ALL)
            self._memory[_HEAD.size : _HEAD.size + length] = ids
            self._written_ids = ids
        _HEAD.pack_into(self._memory, 0, self._num_records, self._predicted_s, doing, length)

    # ---- the API server's side -------------------------------------------------------------------

    def read(self) -> Activity:
        """The last record. Never raises, even if a broken process wrote invalid data."""
        _, _, number, length = _HEAD.unpack(self._memory[: _HEAD.size])
        try:
            doing = Doing(number)
            if length == _ALL:
                return Activity(doing, None)
            ids = self._memory[_HEAD.size : _HEAD.size + length]
            return Activity(doing, frozenset(_decoder.decode(ids)) if ids else frozenset())
        except (ValueError, msgspec.DecodeError):
            return Activity(Doing.COMPUTING, None)

    def pace(self) -> Pace:
        """The progress of the process. Never raises."""
        num_records, predicted_s, _, _ = _HEAD.unpack(self._memory[: _HEAD.size])
        return Pace(num_records, predicted_s)


def _encoded(request_ids: Collection[str]) -> bytes | None:
    """The encoded ids. Returns None, which stands for all requests, if the memory is too small."""
    ids = _encoder.encode(list(request_ids))
    return ids if _HEAD.size + len(ids) <= NUM_BYTES else None
