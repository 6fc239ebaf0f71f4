"""Device times of steps, with events whose times are made by hand."""

import pytest

from quire.runtime import step_timer
from quire.runtime.step_timer import StepTimer


class Queue:
    """A device's: `now_ms` is how far it has come. Events are as torch's. host_ms: the clock's."""

    def __init__(self) -> None:
        self.now_ms = self.host_ms = 0.0
        self.marks_ms: list[float] = []
        self.num_events = 0

    def new_event(self) -> "Event":
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.at_ms = self.queue.marks_ms.pop(0)

    def query(self) -> bool:
        return self.at_ms <= self.queue.now_ms

    def synchronize(self) -> None:
        self.queue.now_ms = max(self.queue.now_ms, self.at_ms)

    def elapsed_time(self, later: "Event") -> float:
        assert self.query() and later.query(), "not recorded yet"
        return later.at_ms - self.at_ms


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr(step_timer, "_new_event", found.new_event)
    monkeypatch.setattr(step_timer, "perf_counter", lambda: found.host_ms / 1e3)
    return found


def launch(
    timer: StepTimer, queue: Queue, began_ms: float, ended_ms: float, launch_ms: float = 0.0
) -> None:
    queue.marks_ms = [began_ms, ended_ms]
    timer.begin()
    queue.host_ms += launch_ms
    timer.end()


def test_each_step_is_told_once_and_events_are_used_again(queue: Queue) -> None:
    timer = StepTimer()
    for step in range(20):
        launch(timer, queue, 10.0 * step, 10.0 * step + 7.0)
        queue.now_ms = 10.0 * step + 6.9  # the result has come, its step is all but over
        assert timer.wait()[0] == pytest.approx(0.007)
        assert queue.now_ms == 10.0 * step + 7.0, "it has ended"
    assert queue.num_events == 2


def test_a_step_is_waited_for_whatever_has_ended_since(queue: Queue) -> None:
    timer = StepTimer()
    launch(timer, queue, 0.0, 5.0)
    launch(timer, queue, 5.0, 9.0)
    assert timer.wait()[0] == pytest.approx(0.005)
    assert queue.now_ms == 5.0, "the next one may still run"
    launch(timer, queue, 9.0, 12.0)
    queue.now_ms = 11.0  # the second ended long ago
    assert timer.wait()[0] == pytest.approx(0.004)
    assert queue.now_ms == 11.0, "which is not the time to wait for the third"
    assert timer.wait()[0] == pytest.approx(0.003)


def test_steps_that_failed_are_forgotten(queue: Queue) -> None:
    timer = StepTimer()
    launch(timer, queue, 0.0, 5.0)
    queue.marks_ms = [6.0]
    timer.begin()
    timer.clear()
    launch(timer, queue, 8.0, 9.0)
    assert timer.wait()[0] == pytest.approx(0.001)


def test_a_step_waits_for_launches_at_most_while_it_is_queued_and_nothing_runs_before_it(
    queue: Queue,
) -> None:
    timer = StepTimer()
    launch(timer, queue, 0.0, 5.0, launch_ms=4.0)  # the device was idle
    queue.now_ms = 3.0
    launch(timer, queue, 5.0, 9.0, launch_ms=4.0)  # all was queued while it ran the first
    queue.now_ms = 5.5
    assert timer.wait() == pytest.approx((0.005, 0.004))
    queue.now_ms = 9.5
    launch(timer, queue, 9.5, 10.0, launch_ms=2.0)  # the second ended before all was queued
    assert timer.wait() == pytest.approx((0.004, 0.0))
    assert timer.wait() == pytest.approx((0.0005, 0.0005))
