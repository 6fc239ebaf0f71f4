"""One rank that is not the first: it makes the calls of `core.step.Runner` that rank 0 makes.

Rank 0 sends each call over a socket, msgpack behind a length of four bytes, and nothing comes back:
what the ranks compute travels between them in the layers' collectives, and as all of them have the
same logits, each samples for itself. A worker says only that it is there, that it is ready, and why
it failed. It ends when the socket does.

Knows no scheduler and no requests. Called by `engine.worker_process`; `executor` is the other end.
"""

import contextlib
import socket
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from quire.core.step import Runner, StepPlan
from quire.errors import QuireError

MAX_MESSAGE_BYTES = 256 << 20
"""No message is longer. The longest carry the tokens of the prompts that enter a step."""

_LENGTH = struct.Struct(">I")


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """Who the worker is; always the first message. meeting_place: see `distributed.group`."""

    options: dict[str, Any]
    rank: int
    size: int
    meeting_place: str


class Execute(msgspec.Struct, tag="execute", array_like=True, frozen=True):
    """`Runner.execute`."""

    plan: StepPlan


class Sample(msgspec.Struct, tag="sample", array_like=True, frozen=True):
    """`Runner.sample`."""

    masks: dict[int, bytes] | None = None


class FetchResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """`Runner.result`."""


class Reset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """`Runner.reset`."""


class Joining(msgspec.Struct, tag="joining", array_like=True, frozen=True):
    """The worker is about to meet the other ranks."""


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The worker has built its share of the model and takes calls."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Why the worker is about to end. code: of an error in `errors`."""

    code: str
    message: str


Call: TypeAlias = Execute | Sample | FetchResult | Reset
ToWorker: TypeAlias = Join | Call
FromWorker: TypeAlias = Joining | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class PeerGoneError(Exception):
    """The other end of the socket is closed."""


def send(sock: socket.socket, *messages: ToWorker | FromWorker) -> None:
    """Waits until the socket has taken them. Raises PeerGoneError."""
    frames = bytearray()
    for message in messages:
        body = _encoder.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} takes {len(body)} bytes"
        frames += _LENGTH.pack(len(body)) + body
    try:
        sock.sendall(frames)
    except OSError as error:
        raise PeerGoneError(str(error)) from error


def receive_call(sock: socket.socket) -> ToWorker:
    """The next message from rank 0; waits for it. Raises PeerGoneError."""
    return _to_worker.decode(_receive(sock))


def receive_news(sock: socket.socket) -> FromWorker:
    """The next message from a worker; waits for it. Raises PeerGoneError."""
    return _from_worker.decode(_receive(sock))


def _receive(sock: socket.socket) -> bytes:
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return _receive_exactly(sock, num_bytes)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        try:
            data = sock.recv(num_bytes - len(found))
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        if not data:
            raise PeerGoneError("end of stream")
        found += data
    return bytes(found)


Build: TypeAlias = Callable[[Join, Callable[[], None]], Runner]
"""From what Join says, a runner of this rank's share of the model. The function that it is given is
to be called just before the ranks meet."""


def serve_calls(sock: socket.socket, build: Build) -> int:
    """Be a worker until rank 0 is gone. Returns the process's exit code."""
    meeting_place: Path | None = None
    try:
        join = receive_call(sock)
        assert isinstance(join, Join), "the first message must say who the worker is"
        meeting_place = Path(join.meeting_place)
        runner = build(join, lambda: send(sock, Joining()))
        send(sock, Ready())
        while True:
            _make(receive_call(sock), runner)
    except PeerGoneError:
        code = 0
    except QuireError as error:
        code = _report(sock, Failed(error.code, str(error)))
    except Exception as error:
        # The last line of defence: the process ends either way, and rank 0 is told why.
        traceback.print_exc()
        code = _report(sock, Failed(QuireError.code, f"{type(error).__name__}: {error}"))
    if code == 0 and meeting_place is not None:  # a rank 0 that was killed has not tidied up
        with contextlib.suppress(OSError):
            meeting_place.unlink(missing_ok=True)
            meeting_place.parent.rmdir()
    return code


def _make(call: ToWorker, runner: Runner) -> None:
    match call:
        case Execute(plan):
            runner.execute(plan)
        case Sample(masks):
            runner.sample(masks)
        case FetchResult():
            runner.result()
        case Reset():
            runner.reset()
        case Join():
            raise AssertionError("the worker was told twice who it is")


def _report(sock: socket.socket, failed: Failed) -> int:
    try:
        send(sock, failed)
    except PeerGoneError:
        return 0  # where rank 0 went first, it knows why
    return 1
