"""The process of a rank beyond the first: repeats rank 0's calls.

Rank 0 sends each call over a socket (see `ipc`), and nothing comes back: what the ranks compute
travels between them in the layers' collectives, and as all of them have the same logits, each
samples for itself. A worker says only that it is about to join, that it is ready, and why it
failed. It ends when the socket does.

Knows no scheduler and no requests. Called by `assembly.worker_main`; `executor` is the other end.
"""

import contextlib
import select
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from quire.core.step import Runner, StepPlan
from quire.errors import QuireError
from quire.ipc import PeerGoneError, decoder, receive, send


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """Who the worker is; always the first message. rendezvous: see `distributed.group`."""

    options: dict[str, Any]
    rank: int
    size: int
    rendezvous: str


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


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The worker has built its share of the model and takes calls."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """Why the worker is about to end. code: of an error in `errors`."""

    code: str
    message: str


Call: TypeAlias = Execute | Sample | FetchResult | Reset
ToWorker: TypeAlias = Join | Call
FromWorker: TypeAlias = Joining | WorkerReady | Failed

_decode_call: Callable[[bytes], ToWorker] = decoder(ToWorker, "rank 0")
_decode_news: Callable[[bytes], FromWorker] = decoder(FromWorker, "a worker")


def receive_call(sock: socket.socket) -> ToWorker:
    """The next message from rank 0; waits for it. Raises PeerGoneError, MessageError."""
    return _decode_call(receive(sock))


def receive_news(sock: socket.socket) -> FromWorker:
    """The next message from a worker; waits for it. Raises PeerGoneError, MessageError."""
    return _decode_news(receive(sock))


Build: TypeAlias = Callable[[Join, Callable[[], None]], Runner]
"""From what Join says, a runner of this rank's share of the model. The function that it is given is
to be called just before the ranks meet."""


def serve_calls(
    sock: socket.socket,
    build: Build,
    on_call: Callable[[], object] | None = None,
    on_idle: Callable[[float], float | None] | None = None,
) -> int:
    """Be a worker until rank 0 is gone. Returns the process's exit code.

    on_call: called after each call that was made. on_idle: called while no call comes, with the
    seconds since the last; returns after how many it wants to be called again (None: not before the
    next call).
    """
    rendezvous: Path | None = None
    try:
        join = receive_call(sock)
        assert isinstance(join, Join), "the first message must say who the worker is"
        rendezvous = Path(join.rendezvous)
        runner = build(join, lambda: send(sock, Joining()))
        send(sock, WorkerReady())
        while True:
            if on_idle is not None:
                _wait_for_call(sock, on_idle)
            _make(receive_call(sock), runner)
            if on_call is not None:
                on_call()
    except PeerGoneError:
        code = 0
    except QuireError as error:
        code = _report(sock, Failed(error.code, str(error)))
    except Exception as error:
        # The last line of defence: the process ends either way, and rank 0 learns why.
        code = report_failure(sock, error)
    if code == 0 and rendezvous is not None:  # a rank 0 that was killed has not tidied up
        with contextlib.suppress(OSError):
            rendezvous.unlink(missing_ok=True)
            rendezvous.parent.rmdir()
    return code


def _wait_for_call(sock: socket.socket, on_idle: Callable[[float], float | None]) -> None:
    """Until there is something to read, or on_idle has nothing to do."""
    began_s = time.monotonic()
    while (wait_s := on_idle(time.monotonic() - began_s)) is not None:
        if select.select([sock], [], [], wait_s)[0]:
            return


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
            raise AssertionError("the worker was given its rank twice")


def report_failure(sock: socket.socket, error: Exception) -> int:
    """Tell rank 0 of an error that nobody has foreseen. Returns the process's exit code."""
    traceback.print_exception(error)
    return _report(sock, Failed(QuireError.code, f"{type(error).__name__}: {error}"))


def _report(sock: socket.socket, failed: Failed) -> int:
    try:
        send(sock, failed)
    except PeerGoneError:
        return 0  # where rank 0 went first, it knows why
    return 1
