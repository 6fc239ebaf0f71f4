"""Background work that an engine's loop and a rank's loop do while they are idle."""

import socket
import threading
from collections.abc import Callable

from tests.engine_client import fake_engine_process as fake
from tests.runtime.fake_rank import RecordingRunner
from tests.runtime.test_worker import JOIN

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.step import StepPlan
from quire.engine_client.messages import AddRequest, Shutdown
from quire.engine_process.engine_loop import Channel, EngineLoop
from quire.ipc import encode, receive, send
from quire.runtime.worker import Execute, WorkerReady, receive_news, serve_calls

WAIT_S = 60.0


class IdleWork:
    """Records its calls, and lets tests wait for a number of them."""

    def __init__(self, wait_s: float | None) -> None:
        self.wait_s = wait_s
        self.idle_s: list[float] = []
        self._changed = threading.Condition()

    def __call__(self, idle_s: float) -> float | None:
        with self._changed:
            self.idle_s.append(idle_s)
            self._changed.notify()
        return self.wait_s

    def wait_for(self, is_there: Callable[[list[float]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_there(self.idle_s), WAIT_S)


def test_an_idle_engine_calls_on_idle_and_counts_anew_after_a_step() -> None:
    ours, theirs = socket.socketpair()
    engine, work = fake.FakeEngine({}), IdleWork(0.001)
    engine.on_idle = work
    loop = EngineLoop(engine, Channel(theirs))
    thread = threading.Thread(target=loop.run)
    thread.start()
    with ours, theirs:
        work.wait_for(lambda idle_s: len(idle_s) > 4)
        ours.sendall(encode(AddRequest(Request("a", [10], DecodingParams(max_tokens=3)))))
        work.wait_for(lambda idle_s: idle_s.count(0.0) > 1)
        ours.sendall(encode(Shutdown(drain=True)))
        thread.join(WAIT_S)
    assert not thread.is_alive()
    again = work.idle_s.index(0.0, 1)
    assert work.idle_s[0] == 0.0
    assert work.idle_s[:again] == sorted(work.idle_s[:again])
    assert work.idle_s[again:] == sorted(work.idle_s[again:])
    assert engine.num_steps == 3


def test_an_idle_engine_calls_on_idle_once_per_message_if_it_returns_none() -> None:
    ours, theirs = socket.socketpair()
    engine, work = fake.FakeEngine({}), IdleWork(None)
    engine.on_idle = work
    loop = EngineLoop(engine, Channel(theirs))
    thread = threading.Thread(target=loop.run)
    thread.start()
    with ours, theirs:
        receive(ours)
        ours.sendall(encode(Shutdown(drain=False)))
        thread.join(WAIT_S)
    assert len(work.idle_s) <= 2


def test_an_idle_rank_calls_on_idle_and_takes_the_next_call() -> None:
    ours, theirs = socket.socketpair()
    runner, work, codes = RecordingRunner(), IdleWork(0.001), []

    def serve() -> None:
        codes.append(serve_calls(theirs, lambda *_: runner, on_idle=work))

    thread = threading.Thread(target=serve)
    thread.start()
    with ours, theirs:
        send(ours, JOIN)
        assert receive_news(ours) == WorkerReady()
        work.wait_for(lambda idle_s: len(idle_s) > 4)
        plan = StepPlan(1, 1, 1)
        send(ours, Execute(plan))
        num_before = len(work.idle_s)
        work.wait_for(lambda idle_s: len(idle_s) > num_before + 4)
        assert runner.calls == [f"execute {plan}"]
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
    assert codes == [0]
