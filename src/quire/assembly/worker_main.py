"""The process of a rank beyond the first: `python -m quire.assembly.worker_main --fd N`.

Rank 0, which is in the engine's process, starts it with one end of a socket pair as descriptor N.
What it does is in `runtime.worker`. Started by `runtime.executor`.
"""

import os
import sys
from collections.abc import Callable, Sequence

from quire.assembly import process_main
from quire.core.step import Runner
from quire.runtime.worker import Build, Join, serve_calls


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run the process; its exit code. build: makes the runner; `build.build_worker` by default."""
    _, sock = process_main.begin(process_main.parser("quire.assembly.worker_main"), argv)
    return serve_calls(sock, build or _build)


def _build(join: Join, report_joining: Callable[[], None]) -> Runner:
    # Imported here: it brings torch, for which the watching thread must not wait.
    from quire.assembly.build import build_worker

    runner = build_worker(join, report_joining)
    process_main.freeze_heap()
    return runner


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: torch would take a second, and its groups a look at ranks that are gone, to put
    # away what the system takes back at once.
    os._exit(code)
