"""The engine's process: `python -m quire.engine_process.engine_main --fd N --activity-fd M`.

The server starts it with one end of a socket pair as descriptor N. Descriptor M is memory in which
the process records its current activity (see `activity`). Started by `process_link`.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from quire.assembly.address_space import named_memory_failures
from quire.engine.engine import Engine
from quire.engine_client.messages import OnProgress
from quire.engine_client.process.activity import ActivityRecord
from quire.engine_process import process_setup
from quire.engine_process.engine_loop import Build, EngineLoop, build_and_serve


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run the process. Returns its exit code. `build` makes the engine; the default is
    `assembly.build.build_engine`."""
    parser = process_setup.make_parser("quire.engine_process.engine_main")
    parser.add_argument("--activity-fd", type=int, help="inherited; see engine_client.process")
    parser.add_argument("--cpus", help="processors to run on, such as 0,1 (all)")
    arguments, sock = process_setup.set_up(parser, argv)
    if arguments.cpus:
        os.sched_setaffinity(0, [int(number) for number in arguments.cpus.split(",")])
    record = ActivityRecord(arguments.activity_fd)
    if arguments.activity_fd is not None:
        os.close(arguments.activity_fd)
    wakeup, signalled = socket.socketpair()
    for end in (wakeup, signalled):
        end.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)

    def drain_on_sigterm(loop: EngineLoop) -> None:
        def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
            loop.drain()

        signal.signal(signal.SIGTERM, on_sigterm)

    return build_and_serve(
        sock, build or _build_engine, wakeup, drain_on_sigterm, record, process_setup.load_libraries
    )


def _build_engine(options: Mapping[str, object], on_progress: OnProgress) -> Engine:
    with named_memory_failures():
        process_setup.load_libraries()  # now, after the watching thread has started
        from quire.assembly.build import build_engine  # the same

        engine = build_engine(options, on_progress)
    process_setup.freeze_heap()
    if engine.limits.generates:
        engine.grammars.prepare()
    return engine


if __name__ == "__main__":
    sys.exit(main())
