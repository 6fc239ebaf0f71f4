"""What the mains of the engine's and the ranks' processes have in common.

Each has one end of a socket pair, inherited as descriptor N (`--fd N`), to the process that started
it, and ends by itself when the other end is closed, whatever it is doing: its loop sees the end of
the stream, and a thread covers the times when the loop does not read (loading a model, a long
step). Called by `engine_main` and `worker_main`.
"""

import argparse
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence

from quire.child_process import leave_start_text
from quire.observability import log

PEER_GONE_GRACE_S = 1.0
"""How long a process has to notice by itself that its peer is gone, before a thread ends it."""


def parser(program: str) -> argparse.ArgumentParser:
    """Of the arguments that `link.EngineLink` and `executor.Workers` append."""
    made = argparse.ArgumentParser(prog=program)
    made.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    made.add_argument("--stderr-fd", type=int, help="inherited; see child_process.StartText")
    made.add_argument("--log-level", default="warning")
    made.add_argument("--log-format", default="text")
    return made


def begin(
    arguments: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, socket.socket]:
    """Parse argv (None: this process's own), set up logging, and watch the socket, which is
    returned. Ctrl-C is ignored from now on: where it reaches this process, too, the process that
    started it decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parsed = arguments.parse_args(argv)
    if parsed.stderr_fd is not None:
        leave_start_text(parsed.stderr_fd)
    log.configure(parsed.log_level, parsed.log_format)
    sock = socket.socket(fileno=parsed.fd)
    end_with(sock)
    return parsed, sock


def end_with(sock: socket.socket) -> threading.Thread:
    """A daemon thread that ends the process soon after the other end of `sock` was closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # no events asked for: only hang-up and errors are reported
        poll.poll()
        time.sleep(PEER_GONE_GRACE_S)
        os._exit(1)

    thread = threading.Thread(target=watch, name="quire-watch-peer", daemon=True)
    thread.start()
    return thread


def freeze_heap() -> None:
    """Exempt from garbage collection what stands now, and stays. Python would look through all of
    it now and then, which takes 0.1 s where torch is loaded, in the middle of a step."""
    gc.collect()
    gc.freeze()
