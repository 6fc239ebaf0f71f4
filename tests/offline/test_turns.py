"""Turns of an engine that several threads share: who leads, who waits, who leaves how."""

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import InvalidRequestError
from quire.offline.exit_gate import ExitGate
from quire.offline.turns import Turns

TIMEOUT_S = 60.0


class Counter:
    """An engine whose steps count. Asserts that one thread at a time is in it."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.leaders: list[int] = []
        self.before_step: Callable[[], None] = lambda: None
        self.turns = Turns(self._step, ExitGate())
        self._lock = threading.Lock()

    def _step(self) -> None:
        assert self._lock.acquire(blocking=False), "two threads step at once"
        try:
            self.before_step()
            self.num_steps += 1
            self.leaders.append(threading.get_ident())
        finally:
            self._lock.release()

    def wait(self, num_steps: int) -> int:
        """Until so many steps were made in all; the calling thread."""
        self.turns.until(lambda: self.num_steps >= num_steps)
        return threading.get_ident()


def look_until(is_true: Callable[[], bool]) -> None:
    """For what other threads do next."""
    end_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0)  # lets them run


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def assert_free(counter: Counter) -> None:
    """Nobody has kept the turn or a place in a queue."""
    before = counter.num_steps
    counter.wait(before + 1)
    assert counter.num_steps == before + 1
    assert not counter.turns._present and not counter.turns._line and not counter.turns._crowd


def test_one_step_serves_all_who_wait(counter: Counter, pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(8)

    def wait(num_steps: int) -> None:
        together.wait(TIMEOUT_S)
        counter.wait(num_steps)

    for future in [pool.submit(wait, 100 + 10 * index) for index in range(8)]:
        future.result(TIMEOUT_S)
    assert counter.num_steps == 170
    assert_free(counter)


def test_leadership_goes_on_when_the_leader_has_what_it_waits_for(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    is_leading, others_wait = threading.Event(), threading.Event()

    def hold_the_first_step() -> None:
        is_leading.set()
        assert others_wait.wait(TIMEOUT_S)

    counter.before_step = hold_the_first_step
    first = pool.submit(counter.wait, 2)
    assert is_leading.wait(TIMEOUT_S)
    rest = [pool.submit(counter.wait, num_steps) for num_steps in (1, 5, 3)]
    look_until(lambda: len(counter.turns._crowd) == 3)
    others_wait.set()
    idents = [future.result(TIMEOUT_S) for future in (first, *rest)]
    # The first leads for two steps, which answer one more; the next in the queue leads on.
    assert counter.leaders == [idents[0]] * 2 + [idents[2]] * 3
    assert_free(counter)


def test_a_failed_leader_leaves_its_followers_running(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    is_leading, others_wait = threading.Event(), threading.Event()

    def fail() -> None:
        is_leading.set()
        assert others_wait.wait(TIMEOUT_S)
        counter.before_step = lambda: None
        raise ZeroDivisionError

    counter.before_step = fail
    first = pool.submit(counter.wait, 3)
    assert is_leading.wait(TIMEOUT_S)
    rest = [pool.submit(counter.wait, 3) for _ in range(3)]
    look_until(lambda: len(counter.turns._crowd) == 3)
    others_wait.set()
    with pytest.raises(ZeroDivisionError):
        first.result(TIMEOUT_S)
    for future in rest:
        future.result(TIMEOUT_S)
    assert_free(counter)


def test_a_waiting_thread_gets_its_turn_between_two_steps(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    """Also those who come again and again: the crowd's steps are not held up by them for ever."""
    end = threading.Event()
    seen: set[int] = set()

    def visit() -> None:
        while not end.is_set():
            with counter.turns.turn():
                seen.add(counter.num_steps)

    visitors = [pool.submit(visit) for _ in range(3)]
    counter.before_step = lambda: look_until(lambda: bool(counter.turns._line))
    try:
        counter.wait(50)
    finally:
        end.set()
    for visitor in visitors:
        visitor.result(TIMEOUT_S)
    counter.before_step = lambda: None
    assert counter.num_steps == 50
    assert seen >= set(range(1, 50))
    assert_free(counter)


def test_a_waiting_thread_can_be_interrupted_at_once(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    """A real signal, while another thread's step takes as long as it likes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_leading, goes_on = threading.Event(), threading.Event()
    main = threading.get_ident()

    def hold() -> None:
        is_leading.set()
        assert goes_on.wait(TIMEOUT_S)

    def interrupt_the_waiting() -> None:
        look_until(lambda: bool(counter.turns._crowd))
        signal.pthread_kill(main, signal.SIGINT)

    try:
        counter.before_step = hold
        leader = pool.submit(counter.wait, 1)
        assert is_leading.wait(TIMEOUT_S)
        pool.submit(interrupt_the_waiting)
        with pytest.raises(KeyboardInterrupt):
            counter.wait(1)
        assert counter.num_steps == 0, "the step is still under way"
        goes_on.set()
        leader.result(TIMEOUT_S)
        counter.before_step = lambda: None
        assert_free(counter)
    finally:
        goes_on.set()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_raises_nothing_changes_nothing(counter: Counter) -> None:
    noticed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noticed.append(number))
    try:
        counter.before_step = lambda: os.kill(os.getpid(), signal.SIGINT)
        counter.wait(3)
        assert len(noticed) == 3 and counter.num_steps == 3
    finally:
        signal.signal(signal.SIGINT, before)
    counter.before_step = lambda: None
    assert_free(counter)


def test_a_call_from_within_a_step_is_refused(counter: Counter) -> None:
    messages: list[str] = []

    def call_again() -> None:
        for again in (lambda: counter.wait(9), lambda: counter.turns.turn().__enter__()):
            with pytest.raises(InvalidRequestError, match="within one of its own steps") as caught:
                again()
            messages.append(str(caught.value))

    counter.before_step = call_again
    counter.wait(1)
    assert len(messages) == 2 and counter.num_steps == 1
    counter.before_step = lambda: None
    assert_free(counter)


def test_work_of_a_destructor_is_done_after_the_step(counter: Counter) -> None:
    """As when the garbage collector ends an abandoned generator in the middle of a step."""
    done: list[str] = []

    class Abandoned:
        def __del__(self) -> None:
            counter.turns.run_with_turn(lambda: done.append("closed"))
            done.append("destroyed")

    def collect() -> None:
        lost: list[object] = [Abandoned()]
        lost.append(lost)
        del lost
        gc.collect()
        done.append("step")
        counter.before_step = lambda: None

    counter.before_step = collect
    counter.wait(2)
    assert done == ["destroyed", "step", "closed"]
    counter.turns.run_with_turn(lambda: done.append("at once"))
    assert done[-1] == "at once"
    assert_free(counter)


def test_postponed_work_is_done_though_the_step_fails(counter: Counter) -> None:
    done: list[str] = []

    def postpone_and_fail() -> None:
        counter.turns.run_with_turn(lambda: done.append("closed"))
        raise ZeroDivisionError

    counter.before_step = postpone_and_fail
    with pytest.raises(ZeroDivisionError):
        counter.wait(1)
    assert done == ["closed"]
    counter.before_step = lambda: None
    assert_free(counter)


def test_soon_waits_for_the_thread_that_runs_the_action(
    counter: Counter, pool: ThreadPoolExecutor
) -> None:
    """Also where that thread takes the action before the one that brought it looks for it again."""
    is_taken, done = threading.Event(), threading.Event()
    seen: list[bool] = []

    class Taken(deque[Callable[[], None]]):
        def append(self, action: Callable[[], None]) -> None:
            super().append(action)
            assert is_taken.wait(TIMEOUT_S)

    def act() -> None:
        is_taken.set()
        look_until(lambda: bool(counter.turns._line or seen))
        done.set()

    def bring() -> None:
        counter.turns.run_with_turn(act)
        seen.append(done.is_set())

    counter.turns._postponed = Taken()
    counter.before_step = lambda: look_until(lambda: bool(counter.turns._postponed))
    leader, other = pool.submit(counter.wait, 1), pool.submit(bring)
    leader.result(TIMEOUT_S)
    other.result(TIMEOUT_S)
    assert seen == [True]
    counter.before_step = lambda: None
    assert_free(counter)


def test_later_waits_for_no_step(counter: Counter, pool: ThreadPoolExecutor) -> None:
    """A step may need a lock that its thread holds: a log handler's, in garbage collection."""
    lock, is_inside = threading.Lock(), threading.Event()
    done: list[int] = []

    def step_with_lock() -> None:
        is_inside.set()
        assert lock.acquire(timeout=TIMEOUT_S)
        lock.release()

    counter.before_step = step_with_lock
    with lock:
        leader = pool.submit(counter.wait, 1)
        assert is_inside.wait(TIMEOUT_S)
        counter.turns.run_or_postpone(lambda: done.append(threading.get_ident()))
        assert done == []
    assert done == [leader.result(TIMEOUT_S)]
    counter.turns.run_or_postpone(lambda: done.append(0))
    assert done[1:] == [0]  # at once, where no thread has the turn
    assert_free(counter)


def test_crowds_of_all_kinds_at_once(counter: Counter, pool: ThreadPoolExecutor) -> None:
    """Waits, visits, failures and destructors, mixed by a seed for each thread."""
    closed: list[int] = []
    turns = counter.turns

    def live(seed: int) -> None:
        for turn in range(60):
            kind = (seed * 7 + turn * 3) % 5
            if kind == 0:
                with pytest.raises(ZeroDivisionError), counter.turns.turn():
                    raise ZeroDivisionError
            elif kind == 1:
                (turns.run_with_turn if seed % 2 else turns.run_or_postpone)(
                    lambda: closed.append(seed)
                )
            elif kind == 2:
                with counter.turns.turn():
                    counter.turns.step()
            else:
                counter.wait(counter.num_steps + turn % 4)

    for future in [pool.submit(live, seed) for seed in range(8)]:
        future.result(TIMEOUT_S)
    assert len(closed) == sum((seed * 7 + t * 3) % 5 == 1 for seed in range(8) for t in range(60))
    assert_free(counter)
