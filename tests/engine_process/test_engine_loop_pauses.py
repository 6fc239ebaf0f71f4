"""What an engine whose steps overlap does before a pause."""

import socket
import threading

from tests.engine_client import fake_engine_process as fake
from tests.engine_process.test_engine_loop import Front, request, tokens_of

from quire.engine_client.messages import GetStats, Outputs, SetPaused, Shutdown
from quire.engine_process.engine_loop import Channel, EngineLoop


class Overlapping(fake.FakeEngine):
    """A step is launched, and its result is taken in with the next call."""

    is_running = False

    def has_work(self, *, launches=True):
        return self.is_running or (launches and super().has_work())

    def step(self, *, launches=True):
        outputs = super().step() if self.is_running else []
        self.is_running = launches
        return outputs


def test_running_steps_are_finished_before_a_pause():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Overlapping({})
        engine.add(request("a", max_tokens=9))
        engine.step()
        front = Front(ours)
        front.send(SetPaused(True), GetStats())
        thread = threading.Thread(target=EngineLoop(engine, Channel(theirs)).run)
        thread.start()
        front.receive()
        while not isinstance(message := front.receive(), Outputs):
            pass
        assert tokens_of([message], "a") == [11]
        front.send(GetStats())
        assert front.receive().stats["num_steps"] == 1
        assert not engine.is_running
        front.send(Shutdown(drain=False))
        thread.join()
