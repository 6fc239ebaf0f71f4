"""The loop of a worker process of tensor parallelism: repeats rank 0's calls on its rank.

Rank 0 sends each call over a socket (see `ipc`) and gets no answer. The ranks exchange data in the
layers' collectives. All ranks compute equal logits, so every rank samples the same tokens. A worker
sends three kinds of messages: that it is about to join, that it is ready, and why it failed. It
ends when the socket is closed.

Called by `engine_process.worker_main`; `executor` is the other end of the socket.
"""

import contextlib
import select
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from quire.core.step import Runner, StepPlan
from quire.errors import QuireError
from quire.ipc import PeerGoneError, decoder, receive, send


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """The worker's rank and options; always the first message."""

    options: dict[str, Any]
    rank: int
    #: The number of ranks.
    size: int
    #: The path of the file through which the ranks find each other; see `distributed.group`.
    rendezvous: str


class Execute(msgspec.Struct, tag="execute", array_like=True, frozen=True):
    """`Runner.execute`."""

    plan: StepPlan


class Sample(msgspec.Struct, tag="sample", array_like=True, frozen=True):
    """`Runner.sample`."""

    masks: dict[int, Sequence[bytes]] | None = None


class FetchResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """`Runner.result`."""


class Reset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """`Runner.reset`."""


class Joining(msgspec.Struct, tag="joining", array_like=True, frozen=True):
    """The worker is about to join the process group."""


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The worker has built its shard of the model and takes calls."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The reason why the worker is about to end."""

    #: The code of an error class in `errors`.
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
"""Builds the runner of the rank that Join describes. It must call the given function just before it
joins the process group."""


def serve_calls(
    sock: socket.socket,
    build: Build,
    on_call: Callable[[], object] | None = None,
    on_idle: Callable[[float], float | None] | None = None,
) -> int:
    """Serve rank 0's calls until it closes the socket. Returns the process's exit code.

    `on_call` runs after each call of rank 0. While the worker waits for a call, `on_idle` runs with
    the seconds waited so far. It returns the seconds until it should run again, or None if it need
    not run before rank 0's next call.
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
        # Report any other error: the process ends in any case, and rank 0 should learn why.
        code = report_failure(sock, error)
    if code == 0 and rendezvous is not None:  # a killed rank 0 has not removed the file
        with contextlib.suppress(OSError):
            rendezvous.unlink(missing_ok=True)
            rendezvous.parent.rmdir()
    return code


def _wait_for_call(sock: socket.socket, on_idle: Callable[[float], float | None]) -> None:
    """Run on_idle until a call of rank 0 can be read, or until on_idle returns None."""
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
    """Report an unexpected error to rank 0. Returns the process's exit code."""
    traceback.print_exception(error)
    return _report(sock, Failed(QuireError.code, f"{type(error).__name__}: {error}"))


def _report(sock: socket.socket, failed: Failed) -> int:
    try:
        send(sock, failed)
    except PeerGoneError:
        return 0  # rank 0 ended first and knows why
    return 1
