"""A fleet of one engine without a process: what is sent to it, and who is blamed for its deaths."""

import signal
from collections.abc import Callable
from typing import Any

from tests.engine_client.fleet_world import LIMITS

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.failover.crash_attribution import NUM_PROOF_TOKENS
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.messages import AddRequest, Outputs, ToEngine, decode_to_engine
from quire.engine_client.one_engine import OnlyPlacement
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death
from quire.errors import QuireError, RequestKillsEngineError

SEGFAULT, KILLED = -int(signal.SIGSEGV), -int(signal.SIGKILL)
COMPUTING = Activity(Doing.COMPUTING, None)


class FakeWire:
    """What was sent over it; `between_steps` plays the process's part."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self._calls: list[Callable[[], None]] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_to_engine(frame[4:]))

    def call_between_steps(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def between_steps(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def added(self) -> list[str]:
        """The requests that were sent since the last look."""
        found = [
            message.request.request_id for message in self.sent if isinstance(message, AddRequest)
        ]
        self.sent.clear()
        return found


class End:
    """A sink that keeps the end."""

    def __init__(self) -> None:
        self.ends: list[QuireError | None] = []

    def on_output(self, output: SequenceOutput) -> None:
        pass

    def on_end(self, error: QuireError | None) -> None:
        self.ends.append(error)


class OneEngine:
    """The dispatcher of a fleet of one engine, whose process is there again after each death."""

    def __init__(self, *names: str) -> None:
        """Opens requests of these names."""
        self.dispatcher = FleetDispatcher(10**6, lambda: 0.0, OnlyPlacement())
        self.sinks: dict[str, End] = {}
        self._num_branches: dict[str, int] = {}
        self.wire = FakeWire()
        self.start()
        self.open(*names)
        assert self.sent() == list(names)

    def start(self) -> None:
        self.wire = FakeWire()
        self.dispatcher.on_ready("", self.wire, LIMITS, {})

    def open(self, *names: str, n: int = 1, **params: Any) -> None:
        for name in names:
            self.sinks[name], self._num_branches[name] = End(), n
            request = Request(name, [1], DecodingParams(99, **params), n=n)
            self.dispatcher.open([request], self.sinks[name])

    def sent(self) -> list[str]:
        return self.wire.added()

    def bring(
        self, name: str, branch: int = 0, *token_ids: int, end: FinishReason | None = None
    ) -> None:
        output = SequenceOutput(name, branch, token_ids or (7,), finish_reason=end)
        self.dispatcher.on_message("", self.wire, Outputs([output]))

    def prove(self, *names: str) -> None:
        """Bring to all branches what clears a suspect."""
        for _ in range(NUM_PROOF_TOKENS):
            for name in names:
                for branch in range(self._num_branches[name]):
                    self.bring(name, branch)

    def die(self, death: Death) -> frozenset[Death]:
        """What the death explains, once there is another process."""
        explained = self.dispatcher.on_death("", death)
        self.start()
        return explained

    def crash(self, *names: str) -> frozenset[Death]:
        """In a step with these requests; without any, while the process computes for all."""
        return self.die(Death(Activity(Doing.COMPUTING, frozenset(names) or None), SEGFAULT))

    def kill(self, *, num_oom_kills: int | None = 0) -> frozenset[Death]:
        """Of a process that computes for all."""
        return self.die(Death(COMPUTING, KILLED, num_oom_kills=num_oom_kills))

    @property
    def blamed(self) -> list[str]:
        return [
            name
            for name, sink in self.sinks.items()
            if any(isinstance(error, RequestKillsEngineError) for error in sink.ends)
        ]
