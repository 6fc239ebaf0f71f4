"""The process of a rank beyond the first: `python -m quire.engine_process.worker_main --fd N`.

Rank 0, which is in the engine's process, starts it with one end of a socket pair as descriptor N.
`runtime.worker` has the process's loop. With a cache on disk, the process gets two more
descriptors, and a thread serves the rank's part of the cache; see `tiers.rank_service`. Started by
`runtime.executor`.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.core.step import Runner
from quire.engine_process import process_setup
from quire.runtime.worker import Build, Join, report_failure, serve_calls

if TYPE_CHECKING:
    from quire.numa.stragglers import Stragglers
    from quire.tiers.rank_service import RankService


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run the process. Returns its exit code. `build` makes the runner; the default is
    `_Rank.build`."""
    arguments = process_setup.make_parser("quire.engine_process.worker_main")
    arguments.add_argument("--moves-fd", type=int, help="inherited socket for a cache's moves")
    arguments.add_argument("--lock-fd", type=int, help="inherited lock of the cache folder")
    parsed, sock = process_setup.set_up(arguments, argv)
    if build is not None:
        return serve_calls(sock, build)
    rank = _Rank(sock, parsed.moves_fd, parsed.lock_fd)
    return serve_calls(sock, rank.build, rank.count_call, rank.use_idle_time)


class _Rank:
    """The runner of this process and, with a cache on disk, the service for the rank's part of
    it."""

    def __init__(self, sock: socket.socket, moves: int | None, lock: int | None) -> None:
        """Rank 0 sends calls over `sock`. `moves` and `lock` are descriptors for the cache on
        disk; without such a cache, both are None."""
        self._sock, self._moves, self._lock = sock, moves, lock
        self._service: RankService | None = None
        self._stragglers: Stragglers | None = None

    def build(self, join: Join, report_joining: Callable[[], None]) -> Runner:
        process_setup.load_libraries()  # now, after the watching thread has started
        # These imports load torch, so they also come after the thread has started.
        from quire.assembly.build import build_worker
        from quire.assembly.tier_build import rank_service
        from quire.numa.stragglers import Stragglers

        options, rank = build_worker(join, report_joining)
        if rank.binding is not None and rank.binding.leaves_nodes:
            self._stragglers = Stragglers(rank.binding)
        if self._moves is not None:
            assert self._lock is not None, "rank 0 sends both descriptors or none"
            moves = socket.socket(fileno=self._moves)
            self._service = rank_service(moves, self._lock, options, rank, join.rank)
            threading.Thread(target=self._serve_moves, name="quire-moves", daemon=True).start()
        process_setup.freeze_heap()
        return rank.runner

    def count_call(self) -> None:
        if self._service is not None:
            self._service.count_call()

    def use_idle_time(self, idle_s: float) -> float | None:
        """See `runtime.worker.serve_calls`."""
        return None if self._stragglers is None else self._stragglers.search_when_idle(idle_s)

    def _serve_moves(self) -> None:
        assert self._service is not None
        try:
            self._service.run()
        except Exception as error:
            # Moves that are still running may change blocks without reporting it, so the rank must
            # end.
            report_failure(self._sock, error)
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: torch's cleanup takes a second, and its process groups would look for ranks that
    # have ended. The system frees everything at once.
    os._exit(code)
