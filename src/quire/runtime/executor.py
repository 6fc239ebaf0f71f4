"""Starts the worker processes of tensor parallelism and repeats rank 0's calls on them.

Rank 0 owns the processes of the other ranks, and its runner repeats each call on all ranks. All
ranks must make the same calls in the same order; otherwise, collectives of different operations
would be mixed up. So a call that fails on any rank ends the group, since the other ranks' progress
is unknown. The engine process then ends, too, and is restarted as after any other death.

Called by `assembly.build`.
"""

import contextlib
import select
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.child_process import StartText, child_options, last_line
from quire.core.step import Drafts, Runner, StepPlan, StepResult, TokenMasks
from quire.distributed.group import ProcessGroup
from quire.errors import (
    CheckpointError,
    ConfigurationError,
    EngineDeadError,
    InsufficientMemoryError,
    QuireError,
    UnsupportedModelError,
)
from quire.ipc import PeerGoneError, send
from quire.observability import log
from quire.runtime.worker import (
    Call,
    Execute,
    Failed,
    FetchResult,
    FromWorker,
    Join,
    Joining,
    Reset,
    Sample,
    WorkerReady,
    receive_news,
)

END_TIMEOUT_S = 5.0
"""Seconds within which a worker must end after its socket was closed; then it is killed."""

_START_ERRORS: dict[str, type[QuireError]] = {
    kind.code: kind
    for kind in (
        CheckpointError,
        ConfigurationError,
        InsufficientMemoryError,
        UnsupportedModelError,
    )
}

FAILURE_TIMEOUT_S = 1.0
"""Seconds to wait for a failed rank's report, since a collective may fail on this rank before the
report arrives."""

T = TypeVar("T")

logger = log.get_logger(__name__)


class Workers:
    """The processes of ranks 1 to size - 1.

    Invariant: they end at the latest when this object is finalized or this process ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: Mapping[str, Any],
        size: int,
        folder_lock: int | None = None,
    ) -> None:
        """Starts the processes.

        `command` is run with `--fd N` and the arguments of `StartText` and of logging. `options`
        are the engine's, as plain data. `folder_lock` is the descriptor of the cache folder's lock.
        If it is given, each process inherits it as `--lock-fd`, and a socket for moves of cached
        blocks as `--moves-fd`.
        """
        self.size = size
        #: For each rank in order, a second socket for moves of cached blocks, which run while calls
        #: run. Empty without a folder_lock.
        self.moves: list[socket.socket] = []
        self._folder_lock = folder_lock
        self._has_lost_rank = threading.Event()
        folder = tempfile.TemporaryDirectory(prefix="quire-")
        self.rendezvous = Path(folder.name) / "ranks"
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start_texts: list[StartText] = []
        self._owned = owned = contextlib.ExitStack()
        owned.callback(folder.cleanup)
        self._end = weakref.finalize(self, _end, self._sockets, self.moves, self._processes, owned)
        try:
            for rank in range(1, size):
                self._start(command)
                join = Join(dict(options), rank, size, str(self.rendezvous))
                send(self._sockets[-1], join)
        except (OSError, PeerGoneError) as error:
            self._end()
            raise EngineDeadError(f"the process of a rank can't be started: {error}") from error

    def _start(self, command: Sequence[str]) -> None:
        self._start_texts.append(StartText())
        self._owned.callback(self._start_texts[-1].close)
        with contextlib.ExitStack() as theirs:
            descriptors = {"--fd": _add_socket(self._sockets, theirs)}
            if self._folder_lock is not None:
                descriptors["--moves-fd"] = _add_socket(self.moves, theirs)
                descriptors["--lock-fd"] = self._folder_lock
            words = [word for name, number in descriptors.items() for word in (name, str(number))]
            self._processes.append(
                subprocess.Popen(
                    [*command, *words, *StartText.arguments, *log.arguments()],
                    pass_fds=tuple(descriptors.values()),
                    stderr=self._start_texts[-1].descriptor,
                    **child_options(),
                )
            )

    def wait_joining(self) -> None:
        """Wait until all workers are about to join the process group. Raises a worker's error."""
        self._wait_for(Joining)

    def wait_ready(self) -> None:
        """Wait until all workers take calls. Raises a worker's error."""
        self._wait_for(WorkerReady)

    def _wait_for(self, kind: type[FromWorker]) -> None:
        for rank, sock in enumerate(self._sockets, 1):
            news = self._next_message(rank, sock)
            if isinstance(news, QuireError):
                raise news
            assert isinstance(news, kind), news

    def send(self, call: Call) -> None:
        """Send the call to all workers. Raises PeerGoneError."""
        for sock in self._sockets:
            send(sock, call)

    def failure(self, timeout_s: float = 0.0) -> QuireError | None:
        """The error of a worker that fails within timeout_s; None if no worker does.

        If several workers failed, the error of a dead process is preferred, since it usually caused
        the other failures.
        """
        poll = select.poll()
        ranks = {}
        for rank, sock in enumerate(self._sockets, 1):
            ranks[sock.fileno()] = rank, sock
            poll.register(sock, select.POLLIN)
        # Messages sent before a failure are read and dropped.
        while happened := poll.poll(1000 * timeout_s):
            news = [self._next_message(*ranks[fd]) for fd, _ in happened]
            failures = [message for message in news if isinstance(message, QuireError)]
            if failures:
                return max(failures, key=_is_death)
        return None

    def _next_message(self, rank: int, sock: socket.socket) -> FromWorker | QuireError:
        """Wait for a worker's next message. Returns an error if the worker has failed or died."""
        try:
            news = receive_news(sock)
        except PeerGoneError:
            status = self._status(rank)
            how = "" if status is None else f" ({_describe(status)})"
            said = self._start_texts[rank - 1].read()
            if said:
                logger.error("rank %d wrote before it had started:\n%s", rank, said)
            error = EngineDeadError(f"rank {rank}: its process has died{how}{last_line(said)}")
            error.rank_status = status
            return error
        if isinstance(news, Failed):
            kind = _START_ERRORS.get(news.code, EngineDeadError)
            return kind(f"rank {rank}: {news.message}")
        return news

    def _status(self, rank: int) -> int | None:
        """The exit status of a rank's process whose socket has closed; None if it still runs."""
        try:
            return self._processes[rank - 1].wait(FAILURE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    @property
    def has_lost_rank(self) -> bool:
        """Whether `watch` has seen a worker end."""
        return self._has_lost_rank.is_set()

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call on_death from a new thread when a worker has ended."""
        poll, end, lost = select.poll(), self._end, self._has_lost_rank
        for sock in self._sockets:
            poll.register(sock, 0)  # without events: only hang-up and errors are reported

        def watch() -> None:
            poll.poll()
            if end.alive:  # a worker died: `end` was not called
                lost.set()
                on_death()

        threading.Thread(target=watch, name="quire-watch-ranks", daemon=True).start()

    def end(self) -> None:
        """End all workers and wait for them. Further calls have no effect."""
        self._end()


def _add_socket(ours: list[socket.socket], theirs: contextlib.ExitStack) -> int:
    """Make a socket pair and add one end to `ours`. Returns the descriptor of the other end, which
    a worker inherits; `theirs` closes this process's copy."""
    mine, other = socket.socketpair()
    ours.append(mine)
    return theirs.enter_context(other).fileno()


def _end(
    sockets: Sequence[socket.socket],
    moves: Sequence[socket.socket],
    processes: Sequence[subprocess.Popen[bytes]],
    owned: contextlib.ExitStack,
) -> None:
    for sock in (*sockets, *moves):
        with contextlib.suppress(OSError):  # the other end was closed first
            sock.shutdown(socket.SHUT_RDWR)  # closing alone has no effect while `watch` polls it
        sock.close()
    for process in processes:
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    owned.close()


def _is_death(error: QuireError) -> bool:
    """Whether the error says that the process of a rank has died."""
    return isinstance(error, EngineDeadError) and error.rank_status is not None


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


@contextmanager
def first_rank(
    workers: Workers, device: torch.device, *, fixed_order: bool = False
) -> Iterator[ProcessGroup]:
    """Join the workers in a process group. Rank 0 builds its shard of the model inside the `with`.

    At the end of the `with` all ranks are ready. If any rank fails before, all workers are ended,
    and a worker's error is raised if there is one. `fixed_order` is as in `ProcessGroup`.
    """
    try:
        workers.wait_joining()
        group = ProcessGroup(workers.rendezvous, 0, workers.size, device, fixed_order=fixed_order)
        workers.watch(group.abort)
        yield group
        workers.wait_ready()
    except QuireError:
        workers.end()
        raise
    except BaseException as error:
        failure = workers.failure(FAILURE_TIMEOUT_S)
        workers.end()
        if failure is not None:
            raise failure from error
        raise


class DistributedRunner:
    """Makes every call on all ranks: on the workers by a message, on rank 0 by `runner`.

    See `core.step.Runner`. Invariant: until a call has failed, all ranks make the same calls.
    Afterwards there are no workers, and every call except `reset` raises.
    """

    def __init__(self, runner: Runner, workers: Workers) -> None:
        """`runner` is rank 0's. All `workers` must be ready."""
        self._runner = runner
        self._workers = workers
        self._failure: str | None = None
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """The number of calls that rank 0 has made. It is sent with each order to move cached
        blocks, which another rank executes only after it has made as many calls."""
        return self._num_calls

    def draft(self, plan: StepPlan) -> Drafts:
        """See `core.step.Runner`. Only rank 0 has a drafter, which computes whole layers and no
        collectives. The other ranks make the plan's changes when they execute it."""
        if self._failure is not None:
            raise self._gone()
        return self._runner.draft(plan)

    def execute(self, plan: StepPlan) -> None:
        """See `core.step.Runner`. This call and the calls below raise EngineDeadError if a rank
        fails."""
        self._call(Execute(plan), lambda: self._runner.execute(plan))

    def sample(self, masks: TokenMasks | None = None) -> None:
        call = Sample(None if masks is None else dict(masks))
        self._call(call, lambda: self._runner.sample(masks))

    def result(self) -> StepResult:
        return self._call(FetchResult(), self._runner.result)

    def reset(self) -> None:
        if self._failure is None:
            self._call(Reset(), self._runner.reset)

    def _call(self, call: Call, make: Callable[[], T]) -> T:
        if self._failure is None:
            try:
                self._workers.send(call)
                made = make()
                if self._workers.has_lost_rank:  # an aborted collective leaves undefined results
                    raise RuntimeError("another rank is gone")
                self._num_calls += 1
                return made
            except Exception as error:
                failure = self._fail(str(error) or type(error).__name__)
                raise failure from error
            except BaseException:  # Ctrl-C: the ranks' progress with the call is unknown
                self._fail("a step was interrupted")
                raise
        raise self._gone()

    def _gone(self) -> EngineDeadError:
        return EngineDeadError(f"tensor parallelism: {self._failure}; make a new engine")

    def _fail(self, reason: str) -> EngineDeadError:
        failure = self._workers.failure(FAILURE_TIMEOUT_S)
        self._failure = f"rank 0: {reason}" if failure is None else str(failure)
        self._workers.end()
        error = EngineDeadError(f"tensor parallelism: {self._failure}")
        if isinstance(failure, EngineDeadError):
            error.rank_status = failure.rank_status
        return error
