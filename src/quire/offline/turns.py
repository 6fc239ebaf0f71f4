"""Lets several threads share one engine, a step at a time.

One of the threads that wait for results is the leader: it steps the engine for all of them. The
others, the crowd, sleep until a step has brought their results. When the leader has its own result,
fails or is interrupted, the next thread leads. A thread that needs the engine for a moment, such as
to open a request, waits in a line. After each step, the leader goes to the line's end.

Independent of the engine. Called by `request_table`.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock, current_thread, get_ident, main_thread

from quire.errors import InvalidRequestError
from quire.offline.exit_gate import ExitGate
from quire.offline.interrupts import deferred_interrupts

MAX_SLEEP_S = 0.2
"""A thread that waits for another thread's steps notices a signal within this many seconds."""


class _Waiter:
    """A thread that waits for the turn, or for the result of a step."""

    __slots__ = ("_bell", "has_come", "has_turn", "is_answered", "thread")

    def __init__(self, has_come: Callable[[], bool]) -> None:
        #: Returns True once the result has come; called by the thread that has the turn.
        self.has_come = has_come
        #: Whether this thread may use the engine.
        self.has_turn = False
        #: Whether a step has brought the result.
        self.is_answered = False
        self.thread = get_ident()
        #: Wakes the thread. Only this queue of the standard library is safe in signal handlers.
        self._bell: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Make `sleep` return, now or at its next call."""
        self._bell.put(None)

    def sleep(self) -> None:
        """Sleep until `ring` is called; in the main thread, at most MAX_SLEEP_S."""
        # A signal that comes just before the thread blocks is not seen until it wakes. So the main
        # thread, which alone handles signals, sleeps with a time limit.
        with suppress(Empty):
            self._bell.get(timeout=MAX_SLEEP_S if current_thread() is main_thread() else None)


class Turns:
    """Grants threads the turn: the exclusive use of one engine.

    Invariants: at most one thread has the turn, and some thread has it while any thread waits. The
    leader has the turn or stands in line, and there is a leader while there is a crowd. A thread
    that leaves, even by an exception, gives up the turn, the lead, and its place in line or crowd.
    """

    def __init__(self, step: Callable[[], None], gate: ExitGate) -> None:
        """`step` steps the engine; the thread that has the turn calls it, inside `gate`."""
        self._step = step
        self._gate = gate
        #: Guards the turn, the leader, line and crowd. It is held briefly, never while waiting.
        self._mutex = Lock()
        #: Whether a thread has the turn.
        self._is_taken = False
        self._leader: _Waiter | None = None
        #: Threads that wait for the turn.
        self._line: deque[_Waiter] = deque()
        #: Threads that wait for a result of the leader's steps.
        self._crowd: deque[_Waiter] = deque()
        #: Threads inside `turn`, `until` or `run_or_postpone`; each thread changes only its own
        #: entry.
        self._present: set[int] = set()
        #: Actions that the thread with the turn has to run.
        self._postponed: deque[Callable[[], None]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Reserve the engine for this thread, between two steps. Signals, such as Ctrl-C, are
        handled when the block ends.

        Raises InvalidRequestError in a thread that is already inside `turn` or `until`.
        """
        with deferred_interrupts(), self._presence():
            waiter = _Waiter(lambda: False)
            try:
                with self._mutex:
                    self._join_line(waiter)
                while not waiter.has_turn:
                    waiter.sleep()
                with self._gate:
                    yield
            finally:
                self._release_turn(waiter)

    def until(self, has_come: Callable[[], bool]) -> None:
        """Step the engine until has_come() is true, or wait while another thread steps it.

        The thread that has the turn calls `has_come` after each step, until it has returned True.
        Raises the errors of `turn` and of this thread's own steps. Signals, such as Ctrl-C, are
        handled between two steps, and within MAX_SLEEP_S in a thread that only waits.
        """
        waiter = _Waiter(has_come)
        # Each further round follows a signal whose handler did not raise.
        while not self._step_until_answered(waiter):
            pass

    def step(self) -> None:
        """Step the engine once, with the turn, and wake threads whose results have come."""
        self._step()
        self._run_postponed()
        with self._mutex:
            for waiter in tuple(self._crowd):
                if waiter.has_come():
                    self._crowd.remove(waiter)
                    waiter.is_answered = True
                    waiter.ring()

    def run_with_turn(self, action: Callable[[], None]) -> None:
        """Run `action` with the turn, before this method returns.

        If this thread is already inside `turn` or `until`, the action runs later. That happens if
        the garbage collector ends a generator in the middle of a step.
        """
        self._postponed.append(action)
        if get_ident() not in self._present and not sys.is_finalizing():
            with self.turn():  # runs the action at its end, unless another thread has run it
                pass

    def run_or_postpone(self, action: Callable[[], None]) -> None:
        """Run `action` with the turn: now if the turn is free, else after the step of the thread
        that has the turn.

        Never waits for another thread. So the garbage collector may call this method in a thread
        that holds a lock that a step needs, such as a log handler's lock.
        """
        self._postponed.append(action)
        while self._postponed and self._run_if_free():
            pass

    def _run_if_free(self) -> bool:
        """Run postponed actions, unless a thread has the turn. That thread runs them when it
        leaves.

        Returns whether the turn was free.
        """
        me = get_ident()
        if me in self._present or sys.is_finalizing():
            return False
        waiter = _Waiter(lambda: False)
        with deferred_interrupts():
            self._present.add(me)
            try:
                with self._mutex:
                    if not self._is_taken:
                        self._join_line(waiter)  # the waiter gets the turn at once
                was_free = waiter.has_turn
                self._release_turn(waiter)
            finally:
                self._present.discard(me)
        return was_free

    def _step_until_answered(self, waiter: _Waiter) -> bool:
        """Step the engine as leader, or wait for the leader's steps. Returns True if the result has
        come, False if a signal has come first."""
        # The leader steps at least once per turn, so that a long line can't prevent steps.
        has_stepped = False
        with deferred_interrupts(waiter.ring) as interrupts, self._presence():
            try:
                self._lead_or_follow(waiter)
                while not interrupts and not waiter.is_answered:
                    if not waiter.has_turn:
                        waiter.sleep()
                    elif waiter.has_come():
                        waiter.is_answered = True
                    elif has_stepped and self._line:
                        self._pass_turn_to_line(waiter)
                        has_stepped = False
                    else:
                        with self._gate:
                            self.step()
                        has_stepped = True
            finally:
                self._release_turn(waiter)
        return waiter.is_answered

    @contextmanager
    def _presence(self) -> Iterator[None]:
        me = get_ident()
        if me in self._present:
            raise InvalidRequestError(
                "the LLM was called from within one of its own steps (by a signal handler, a log"
                " handler or a destructor), which can't be done in the middle; call it afterwards"
            )
        try:
            self._present.add(me)
            yield
        finally:
            self._present.discard(me)
            self._flush()

    def _join_line(self, waiter: _Waiter) -> None:
        self._line.append(waiter)
        if not self._is_taken:
            self._serve_next()

    def _serve_next(self) -> None:
        """Give the free turn to the first thread in line."""
        self._is_taken = bool(self._line)
        if self._line:
            waiter = self._line.popleft()
            waiter.has_turn = True
            waiter.ring()

    def _lead_or_follow(self, waiter: _Waiter) -> None:
        with self._mutex:
            if self._leader is None:
                self._leader = waiter
                self._join_line(waiter)
            else:
                self._crowd.append(waiter)

    def _pass_turn_to_line(self, leader: _Waiter) -> None:
        """Pass the turn to the threads now in line. Threads that join later wait for the leader's
        step."""
        with self._mutex:
            leader.has_turn = False
            self._line.append(leader)
            self._serve_next()

    def _release_turn(self, waiter: _Waiter) -> None:
        """Give up the waiter's turn, lead and place, after running postponed actions."""
        try:
            if waiter.has_turn:
                self._run_postponed()
        finally:
            with self._mutex:
                for queue in (self._line, self._crowd):
                    if waiter in queue:
                        queue.remove(waiter)
                if waiter is self._leader:
                    self._leader = self._crowd.popleft() if self._crowd else None
                    if self._leader is not None:
                        self._line.append(self._leader)
                if waiter.has_turn:
                    waiter.has_turn = False
                    self._serve_next()

    def _run_postponed(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def _flush(self) -> None:
        """Run postponed actions, unless the interpreter ends.

        At the end of the interpreter, the thread that has the turn may never go on, and the
        process's memory is freed anyway.
        """
        while self._postponed and not sys.is_finalizing():
            with self.turn():
                pass
