"""The process of a rank beyond the first: `python -m quire.assembly.worker_main --fd N`.

Rank 0, which is wherever the engine is, starts it with one end of a socket pair as descriptor N,
and it ends with that socket, whatever it is doing. Started by `runtime.executor`.
"""

import argparse
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from quire.assembly.engine_main import watch_front
from quire.core.step import Runner
from quire.observability import log
from quire.runtime.worker import Build, Join, serve_calls


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run the process. build: makes the runner; `engine.build.build_worker` by default."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="quire.assembly.worker_main")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args(argv)
    log.configure(arguments.log_level, arguments.log_format)
    sock = socket.socket(fileno=arguments.fd)
    watch_front(sock)
    return serve_calls(sock, build or _build)


def _build(join: Join, tell_joining: Callable[[], None]) -> Runner:
    # Imported here: it brings torch, which the watcher above must not wait for.
    from quire.assembly.build import build_worker

    runner = build_worker(join, tell_joining)
    # As in rank 0: a full collection would look at all of this in the middle of a step.
    gc.collect()
    gc.freeze()
    return runner


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: torch would take a second, and its groups a look at ranks that are gone, to put
    # away what the system takes back at once.
    os._exit(code)
