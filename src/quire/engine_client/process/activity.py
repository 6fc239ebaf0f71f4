"""What the engine process is doing, readable after it died.

Front and engine share a piece of memory. The engine writes into it before each thing that it does,
which takes no system call; whatever ends the process, kill -9 included, what it wrote stays, and
tells the front whose step was under way. Made by `link`, written by `engine_main`, judged
by `recovery`.
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
"""Of the shared memory; only what is written takes any. Holds the ids of some thousand sequences;
where they don't fit, the record names all requests that the process knows of."""

_HEAD = struct.Struct("=II")  # what is being done; the length of the request ids that follow
_ALL = 0xFFFF_FFFF  # as a length: no ids follow, all that the process knows of are meant

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[str]] = msgspec.msgpack.Decoder(list[str])


class Doing(IntEnum):
    """What an engine process can be at. It is LOADING until it has written anything."""

    LOADING = 0  # before it takes requests
    IDLE = 1  # waiting for messages, with nothing to compute
    TAKING_IN = 2  # a new request, or the end of one
    PLANNING = 3  # choosing what the next step computes, from all requests
    COMPUTING = 4  # a step, until the next thing is written: its results are sent meanwhile


class Activity(NamedTuple):
    """request_ids: of those that are being taken in or computed; None for all that the process
    knows of."""

    doing: Doing
    request_ids: frozenset[str] | None = frozenset()

    def concerns(self, request_id: str) -> bool:
        """Whether the process was at work for this request, if it knew of it."""
        return self.request_ids is None or request_id in self.request_ids

    def names_others(self, request_id: str) -> bool:
        """Whether the process is known to have been at work for another request, too."""
        return self.request_ids is not None and not self.request_ids <= {request_id}


def make_shared_memory() -> int:
    """A descriptor of zeroed memory that no path leads to, for the caller to close."""
    fd = unnamed_file("quire-activity")
    os.truncate(fd, NUM_BYTES)
    return fd


class ActivityRecord:
    """The shared memory, seen from either side. Invariant: only the engine's side writes."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of what `make_shared_memory` made, which may be closed afterwards; None for memory of
        this process alone. Raises OSError, ValueError."""
        self._memory = mmap.mmap(-1 if fd is None else fd, NUM_BYTES)
        self._computed = _HEAD.pack(Doing.COMPUTING, _ALL)

    # ---- the engine's side ------------------------------------------------------------------

    def idle(self) -> None:
        """Nothing is left to do until a message comes."""
        self._memory[: _HEAD.size] = _HEAD.pack(Doing.IDLE, 0)

    def take_in(self, request_id: str) -> None:
        """A message about this request is looked at."""
        self._write(_record(Doing.TAKING_IN, [request_id]))

    def plan(self) -> None:
        """A step begins with the choice of what it computes."""
        self._memory[: _HEAD.size] = _HEAD.pack(Doing.PLANNING, _ALL)

    def compute(self, request_ids: Collection[str] | None) -> None:
        """A step is about to run. request_ids: of those in the steps in flight, with this one; None
        for the same as at the last call."""
        if request_ids is not None:
            self._computed = _record(Doing.COMPUTING, request_ids)
        self._write(self._computed)

    def _write(self, record: bytes) -> None:
        self._memory[: len(record)] = record

    # ---- the front's side -------------------------------------------------------------------

    def read(self) -> Activity:
        """What was written last. Nothing that a broken process may have written makes it raise."""
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
