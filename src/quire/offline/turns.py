"""Lets several threads share one engine, a step at a time.

Of the threads that wait for results one leads: it steps the engine for all of them, and the others,
the crowd, sleep until a step has brought what they wait for. When the leader has its own, fails or
is interrupted, the next one leads. A thread that needs the engine for a moment (to open a request,
to read the ledger) stands in a line; after each step the leader goes to the end of it.

Knows no engine. Called by `request_table`.
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
"""How late a signal may be noticed by a thread that waits for another's steps."""


class _Waiter:
    """One thread that wants the turn, or the result of a step.

    has_come: whether the result is there; called by the thread that has the turn. has_turn: this
    thread may use the engine. is_answered: another thread's step brought the result.
    """

    __slots__ = ("_bell", "has_come", "has_turn", "is_answered", "thread")

    def __init__(self, has_come: Callable[[], bool]) -> None:
        self.has_come = has_come
        self.has_turn = False
        self.is_answered = False
        self.thread = get_ident()
        # Of the standard library's ways to wake a thread the one that a signal handler may use.
        self._bell: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Have `sleep` return, now or the next time."""
        self._bell.put(None)

    def sleep(self) -> None:
        """Until something may have changed."""
        # A signal that comes just before the thread blocks is not seen until it wakes: in the main
        # thread, which alone handles signals, not for long.
        with suppress(Empty):
            self._bell.get(timeout=MAX_SLEEP_S if current_thread() is main_thread() else None)


class Turns:
    """The turns of one engine.

    Invariants: at most one thread has the turn; while any thread waits, one has it. The leader has
    the turn or stands in line; while there is a crowd, there is a leader. A thread that leaves,
    however it leaves, keeps neither the turn, nor the lead, nor a place.
    """

    def __init__(self, step: Callable[[], None], gate: ExitGate) -> None:
        """step: one step of the engine; called by the thread that has the turn. gate: through which
        a thread goes to use the engine."""
        self._step = step
        self._gate = gate
        self._mutex = Lock()  # guards what follows; held for a moment, never while waiting
        self._is_taken = False
        self._leader: _Waiter | None = None
        self._line: deque[_Waiter] = deque()
        self._crowd: deque[_Waiter] = deque()
        # Threads between their coming and their leaving. Only their own thread changes their entry.
        self._present: set[int] = set()
        self._postponed: deque[Callable[[], None]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine for this thread alone, between two steps. A signal is handled (Ctrl-C raised)
        when it has ended.

        Raises InvalidRequestError in a thread that is inside of `turn` or `until` already.
        """
        with deferred_interrupts(), self._presence():
            waiter = _Waiter(lambda: False)
            try:
                with self._mutex:
                    self._stand_in_line(waiter)
                while not waiter.has_turn:
                    waiter.sleep()
                with self._gate:
                    yield
            finally:
                self._leave(waiter)

    def until(self, has_come: Callable[[], bool]) -> None:
        """Step the engine until has_come() is true, or wait while another thread's steps do it.

        has_come is called with the turn, after each step, maybe by another thread; not again once
        it was true. Raises what a step raises that this thread makes, and as `turn` does. A
        signal is handled (Ctrl-C raised) between two steps, and within MAX_SLEEP_S in a thread that
        only waits.
        """
        waiter = _Waiter(has_come)
        while not self._take_part(waiter):  # interrupted, by a handler that raised nothing
            pass

    def step(self) -> None:
        """One step, for the thread that has the turn; wakes threads that it has news for."""
        self._step()
        self._run_postponed()
        with self._mutex:
            for waiter in tuple(self._crowd):
                if waiter.has_come():
                    self._crowd.remove(waiter)
                    waiter.is_answered = True
                    waiter.ring()

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` with the turn, before this returns.

        In a thread that is inside of `turn` or `until` already it runs at the next chance: the
        garbage collector may end a generator there, in the middle of a step.
        """
        self._postponed.append(action)
        if get_ident() not in self._present and not sys.is_finalizing():
            with self.turn():  # which runs it, or comes after the thread that has taken it
                pass

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` with the turn: now, if no thread has it, else after that thread's step.

        Never waits for another thread, so the garbage collector may call it in a thread that holds
        a lock which a step needs (a log handler's).
        """
        self._postponed.append(action)
        while self._postponed and self._run_if_free():
            pass

    def _run_if_free(self) -> bool:
        """Run what was postponed, unless a thread has the turn, which runs it when it leaves."""
        me = get_ident()
        if me in self._present or sys.is_finalizing():
            return False
        waiter = _Waiter(lambda: False)
        with deferred_interrupts():
            self._present.add(me)
            try:
                with self._mutex:
                    if not self._is_taken:
                        self._stand_in_line(waiter)  # and has the turn at once
                was_free = waiter.has_turn
                self._leave(waiter)
            finally:
                self._present.discard(me)
        return was_free

    def _take_part(self, waiter: _Waiter) -> bool:
        """Lead the crowd or follow; whether the result has come. If not, it was interrupted."""
        has_stepped = False  # since the turn came, so that no line is too long for a step
        with deferred_interrupts(waiter.ring) as interrupts, self._presence():
            try:
                self._lead_or_follow(waiter)
                while not interrupts and not waiter.is_answered:
                    if not waiter.has_turn:
                        waiter.sleep()
                    elif waiter.has_come():
                        waiter.is_answered = True
                    elif has_stepped and self._line:
                        self._let_others(waiter)
                        has_stepped = False
                    else:
                        with self._gate:
                            self.step()
                        has_stepped = True
            finally:
                self._leave(waiter)
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

    def _stand_in_line(self, waiter: _Waiter) -> None:
        self._line.append(waiter)
        if not self._is_taken:
            self._serve_next()

    def _serve_next(self) -> None:
        """Give the turn, which no thread has, to the first in line."""
        self._is_taken = bool(self._line)
        if self._line:
            waiter = self._line.popleft()
            waiter.has_turn = True
            waiter.ring()

    def _lead_or_follow(self, waiter: _Waiter) -> None:
        with self._mutex:
            if self._leader is None:
                self._leader = waiter
                self._stand_in_line(waiter)
            else:
                self._crowd.append(waiter)

    def _let_others(self, leader: _Waiter) -> None:
        """Threads that stand in line now go first; those that come later wait for another step."""
        with self._mutex:
            leader.has_turn = False
            self._line.append(leader)
            self._serve_next()

    def _leave(self, waiter: _Waiter) -> None:
        """Give up what the waiter has: the turn, the lead, a place."""
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
        """Run what was postponed. Not at the interpreter's end: the thread that has the turn may
        never go on then, and the memory is given back with all else."""
        while self._postponed and not sys.is_finalizing():
            with self.turn():
                pass
