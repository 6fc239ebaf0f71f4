"""Sets up the processes of the engine and its ranks: arguments, logging, end with the parent.

Each process inherits one end of a socket pair to its parent as descriptor N (`--fd N`). The process
ends when the other end is closed: its loop sees the end of the stream. A thread also watches the
socket, because the loop may not read for long (loading a model, a long step). Called by
`engine_main` and `worker_main`.
"""

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence

from quire.child_process import redirect_start_text
from quire.observability import log
from quire.quick_start import quick_imports

PEER_GONE_GRACE_S = 1.0
"""Seconds that the loop has to notice that the other end is closed, before a thread ends the
process."""


def make_parser(program: str) -> argparse.ArgumentParser:
    """A parser of the arguments that `process_link` and `executor.Workers` pass to these
    processes."""
    made = argparse.ArgumentParser(prog=program)
    made.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    made.add_argument("--stderr-fd", type=int, help="inherited; see child_process.StartText")
    made.add_argument("--log-level", default="warning")
    made.add_argument("--log-format", default="text")
    return made


def set_up(
    arguments: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, socket.socket]:
    """Parse argv (None: this process's own), configure logging, and watch the socket.

    Returns the arguments and the socket. Ctrl-C is ignored from now on, because the parent handles
    it and ends this process if needed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parsed = arguments.parse_args(argv)
    if parsed.stderr_fd is not None:
        redirect_start_text(parsed.stderr_fd)
    log.configure(parsed.log_level, parsed.log_format)
    sock = socket.socket(fileno=parsed.fd)
    _end_after_peer(sock)
    return parsed, sock


def _end_after_peer(sock: socket.socket) -> None:
    """Start a daemon thread that ends the process soon after the other end of `sock` is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # no events asked for: only hang-up and errors are reported
        poll.poll()
        time.sleep(PEER_GONE_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="quire-watch-peer", daemon=True).start()


def load_libraries() -> None:
    """Import what building an engine or a rank needs, which takes most of the time of a small
    model's start."""
    with quick_imports():
        importlib.import_module("quire.assembly.build")


def freeze_heap() -> None:
    """Exempt all current objects from garbage collection, since most of them live until the end.

    Otherwise Python sometimes traverses them during a step, which takes 0.1 s with torch loaded.
    """
    gc.collect()
    gc.freeze()
