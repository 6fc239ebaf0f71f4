"""Simulates the failover of a fleet whose links lose, delay and repeat messages.

    python -m benchmarks.cluster.unreliable_links [--seed 0] [--num-events 1000000]

The real `FleetDispatcher` connects simulated clients and engines on a virtual clock. Messages take
random times. While a link is cut, its messages get lost, or arrive late, in any order, once or
twice. Frames are numbered as on real connections, so a connection drops repeated frames and breaks
if a frame is missing. Links are cut and mended; engines are killed, crash, restart and are drained.
Faulty requests kill every engine that runs them.

The simulation checks that each request is answered once, with the tokens that it gets without
faults. A request that kills engines must end with an error, and no other request may be blamed. All
random numbers come from one seed, so a failure can be repeated exactly.
"""

import argparse
import heapq
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.messages import AbortRequest, AddRequest, Outputs, decode_to_engine
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death
from quire.errors import QuireError, RequestKillsEngineError
from quire.observability.log import configure
from quire.simulation.fakes.fake_model import branch_salt, extend, mix

LIMITS = ModelLimits(vocab_size=1000, max_model_len=1000)
HEARTBEAT_S = 0.3
STEP_S = 0.01
RESTART_S = 0.5
LATENCY_S = (0.0002, 0.02)
MAX_TOKENS = 25
ROWS = 12
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """The options of one simulation."""

    seed: int = 0
    num_engines: int = 5
    #: The approximate number of steps, messages and faults after which no request arrives.
    num_events: int = 20_000
    requests_per_s: float = 150.0
    #: The share of requests that kill the engines that compute them.
    kill_rate: float = 0.01
    #: The share of requests whose clients leave.
    abort_rate: float = 0.1
    #: The rate of kills by the operating system, per engine and second.
    killed: float = 0.2
    #: The rate of crashes that no request causes, per engine and second.
    crashed: float = 0.1
    #: The rate at which links are cut, per engine and second.
    cut: float = 0.4
    #: The rate of drains, per engine and second.
    drained: float = 0.2


@dataclass
class FailoverReport:
    """Counts of events by name."""

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))


class FailoverError(AssertionError):
    """A request got no answer or a wrong answer, or was blamed for a death it did not cause."""


class _LeastOpen:
    """A `Placement` that chooses, among accepting replicas, the one with the fewest requests."""

    def __init__(self) -> None:
        self.accepts: dict[str, bool] = {}
        self.placed: dict[str, str] = {}
        self.loads: Counter[str] = Counter()

    def forget_prefixes(self, replica: str) -> None:
        """See `Placement`. Has no effect, since prefixes are not tracked."""

    def set_slowness(self, replica: str, measured: float) -> None:
        """See `Placement`. Has no effect, since all replicas are equally fast."""

    def add(self, replica: str, limits: Any, facts: Any) -> None:
        self.accepts[replica] = True
        self.loads[replica] = 0

    def remove(self, replica: str) -> None:
        del self.accepts[replica]
        self.placed = {each: at for each, at in self.placed.items() if at != replica}
        del self.loads[replica]

    def set_accepting(self, replica: str, accepts: bool) -> None:
        self.accepts[replica] = accepts

    def place(self, request: Request) -> str | None:
        names = [name for name, accepts in self.accepts.items() if accepts]
        if not names:
            return None
        name = min(names, key=lambda each: (self.loads[each], each))
        self.placed[request.request_id] = name
        self.loads[name] += 1
        return name

    def load_of(self, replica: str) -> dict[str, float]:
        return {}

    def on_first_token(self, request_id: str) -> None:
        pass

    def on_end(self, request_id: str) -> None:
        name = self.placed.pop(request_id, None)
        if name is not None:
            self.loads[name] -= 1


class _Client:
    """Receives the outputs of a request, and compares them with the outputs without faults."""

    def __init__(self, world: "FailoverWorld", request: Request, kills_at: int) -> None:
        self.request = request
        #: Number of generated tokens after which the request kills its engine; MAX_TOKENS: never.
        self.kills_at = kills_at
        self.has_left = False
        self.num_ends = 0
        self._world = world
        self._tokens: dict[int, list[int]] = {index: [] for index in range(request.n)}

    def on_output(self, output: SequenceOutput) -> None:
        if self.num_ends:
            raise FailoverError(f"{self.request.request_id}: an output after the end")
        tokens = self._tokens[output.branch_index]
        for token in output.token_ids:
            wanted = self._world.token(self.request, output.branch_index, tokens)
            if token != wanted:
                raise FailoverError(
                    f"{output.request_id}, branch {output.branch_index}: token {len(tokens)} is"
                    f" {token}, alone it is {wanted}"
                )
            tokens.append(token)

    def on_end(self, error: QuireError | None) -> None:
        self.num_ends += 1
        name = self.request.request_id
        if self.num_ends > 1:
            raise FailoverError(f"{name} was answered twice")
        if error is None and not self.has_left:
            if self.kills_at < MAX_TOKENS:
                raise FailoverError(f"{name} kills every engine, but was answered")
            if any(len(each) != self.request.params.max_tokens for each in self._tokens.values()):
                raise FailoverError(f"{name} ended before its answer was complete")
            self._world.report.counts["answered"] += 1
        elif error is not None:
            if not (self.kills_at < MAX_TOKENS and isinstance(error, RequestKillsEngineError)):
                raise FailoverError(f"{name} ended with an error: {error}")
            self._world.report.counts["blamed"] += 1
        else:
            self._world.report.counts["left"] += 1


class _Engine:
    """An engine process. Each step generates a token for up to ROWS branches."""

    def __init__(self, world: "FailoverWorld", name: str) -> None:
        self.name = name
        self.is_running = True
        self.wire: _Wire | None = None
        self._world = world
        self._requests: dict[str, Request] = {}
        self._branches: dict[tuple[str, int], list[int]] = {}

    def handle_message(self, frame: bytes) -> None:
        """Handle a message from the API server."""
        message = decode_to_engine(frame[_LENGTH_BYTES:])
        if isinstance(message, AddRequest):
            request = message.request
            self._requests[request.request_id] = request
            branches: Sequence[Any] = request.resumed or [(n, ()) for n in range(request.n)]
            for index, token_ids in branches:
                if (request.request_id, index) in self._branches:
                    raise FailoverError(f"{request.request_id} was sent twice to {self.name}")
                self._branches[request.request_id, index] = list(token_ids)
        elif isinstance(message, AbortRequest):
            for key in list(self._branches):
                if key[0] == message.request_id and message.branch_index in (None, key[1]):
                    del self._branches[key]

    def forget_all(self) -> None:
        """Drop all branches, since the engine's agent has lost the connection to the API server."""
        self._branches.clear()

    def step(self) -> None:
        """Generate a token for each of the first ROWS branches, or die if one of their requests
        kills engines."""
        if not self.is_running:
            return
        rows = list(self._branches)[:ROWS]
        if any(self._world.kills(name, len(self._branches[name, at])) for name, at in rows):
            self._world.report.counts["killed by a request"] += 1
            ids = frozenset(name for name, _ in rows)
            self._world.die(self, Death(Activity(Doing.COMPUTING, ids), -int(signal.SIGSEGV)))
            return
        outputs = [self._advance(key) for key in rows]
        if outputs and self.wire is not None:
            self.wire.send_to_server(Outputs(outputs))
        self._world.later(STEP_S, self.step)

    def _advance(self, key: tuple[str, int]) -> SequenceOutput:
        request, tokens = self._requests[key[0]], self._branches[key]
        token = self._world.token(request, key[1], tokens)
        tokens.append(token)
        is_last = len(tokens) == request.params.max_tokens
        if is_last:
            del self._branches[key]
        reason = FinishReason.LENGTH if is_last else None
        return SequenceOutput(*key, (token,), finish_reason=reason)

    def busy_with(self) -> frozenset[str]:
        """The ids of the requests in the next step."""
        return frozenset(name for name, _ in list(self._branches)[:ROWS])


class _Wire:
    """One connection between the API server and an engine, in both directions."""

    def __init__(self, world: "FailoverWorld", engine: _Engine) -> None:
        self.is_cut = False  # messages get lost, unnoticed by both ends
        self.is_broken = False  # both ends have closed it
        self._world = world
        self._engine = engine
        self._arrives_s = [0.0, 0.0]  # the arrival of the last message in each direction
        self._num_sent = self._num_taken = 0  # messages of the engine

    def send(self, frame: bytes) -> None:
        """Send a message from the API server to the engine."""
        if not self.is_cut:
            self._later(0, lambda: self._deliver(frame))

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """See `Wire`. The call is sent to the engine and back, in order with other messages, and
        then made."""

        def answer() -> None:
            if self._engine.wire is self:
                self.send_to_server(call)

        if not self.is_cut:
            self._later(0, answer)

    def send_to_server(self, message: Outputs | Callable[[], None]) -> None:
        """Send outputs, or a call to make on arrival, from the engine to the API server."""
        world, number = self._world, self._num_sent
        self._num_sent += 1
        if not self.is_cut:
            self._later(1, lambda: self._deliver_in_order(number, message))
        elif world.rng.random() < 0.5:
            for _ in range(world.rng.choice((1, 2))):
                world.later(
                    world.rng.uniform(0, 3), lambda: self._deliver_in_order(number, message)
                )

    def _deliver(self, frame: bytes) -> None:
        if self._engine.is_running and self._engine.wire is self:
            self._engine.handle_message(frame)

    def _deliver_in_order(self, number: int, message: Outputs | Callable[[], None]) -> None:
        counts = self._world.report.counts
        if self.is_broken:  # the dispatcher must ignore the message
            counts["messages of old connections"] += 1
        elif number < self._num_taken:
            counts["doubled messages"] += 1
            return
        elif number > self._num_taken:
            counts["gaps"] += 1
            self._world.close_connection(self._engine, self)
            return
        self._num_taken = number + 1
        if not isinstance(message, Outputs):
            message()
            return
        self._world.dispatcher.on_message(self._engine.name, self, message)

    def _later(self, direction: int, call: Callable[[], None]) -> None:
        world = self._world
        at_s = max(self._arrives_s[direction], world.now_s + world.rng.uniform(*LATENCY_S))
        self._arrives_s[direction] = at_s
        world.later(at_s - world.now_s, call)


class FailoverWorld:
    """One simulation: the dispatcher, its clients and engines, and a queue of future events."""

    def __init__(self, config: FailoverConfig) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.report = FailoverReport()
        self.now_s = 0.0
        self.dispatcher = FleetDispatcher(10**6, lambda: self.now_s, _LeastOpen())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._clients: dict[str, _Client] = {}
        self._engines: dict[str, _Engine] = {}
        self._is_ending = False

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule `call` for the given number of seconds from now, by the virtual clock."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), call))

    def run(self) -> FailoverReport:
        """Run until enough events have happened and every request was answered."""
        config = self.config
        for number in range(config.num_engines):
            self._start(f"e{number}")
        self._arrive()
        self._fail()
        num_events = 0
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
            num_events += 1
            if num_events >= config.num_events and not self._is_ending:
                self._is_ending = True  # no further requests and faults
            if self._is_ending and not self.dispatcher.num_open:
                break
            if num_events > 20 * config.num_events + 10**6:
                raise FailoverError(f"{self.dispatcher.num_open} requests are never answered")
        missing = [each.request.request_id for each in self._clients.values() if not each.num_ends]
        if missing:
            raise FailoverError(f"never answered: {missing[:5]}")
        self.report.counts["events"] = num_events
        return self.report

    def token(self, request: Request, branch: int, tokens: Sequence[int]) -> int:
        """The next token of a branch. It is the same on each engine."""
        fingerprint = 0
        for token_id in (*request.prompt_token_ids, *tokens):
            fingerprint = extend(fingerprint, token_id)
        return mix(fingerprint ^ branch_salt(request.params.seed, branch)) % LIMITS.vocab_size

    def kills(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request with this many tokens kills the engine that computes its next token."""
        return num_tokens >= self._clients[request_id].kills_at

    # ---- clients ----------------------------------------------------------------------------

    def _arrive(self) -> None:
        if self._is_ending:
            return
        rng = self.rng
        number = len(self._clients)
        params = DecodingParams(max_tokens=rng.randint(1, MAX_TOKENS), seed=rng.getrandbits(32))
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 8))]
        request = Request(f"r{number}", prompt, params, n=rng.choice((1, 1, 1, 3)))
        kills = rng.random() < self.config.kill_rate
        kills_at = rng.randrange(params.max_tokens) if kills else MAX_TOKENS
        client = _Client(self, request, kills_at)
        self._clients[request.request_id] = client
        self.report.counts["requests"] += 1
        stream = self.dispatcher.open([request], client)
        if rng.random() < self.config.abort_rate:

            def leave() -> None:
                if not client.num_ends:
                    client.has_left = True
                    stream.close()

            self.later(rng.uniform(0, 0.5), leave)
        self.later(rng.expovariate(self.config.requests_per_s), self._arrive)

    # ---- engines ----------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        engine = _Engine(self, name)
        self._engines[name] = engine
        self._connect(engine)
        self.later(STEP_S, engine.step)

    def _connect(self, engine: _Engine) -> None:
        engine.wire = _Wire(self, engine)
        self.dispatcher.on_ready(engine.name, engine.wire, LIMITS, {})

    def die(self, engine: _Engine, death: Death) -> None:
        """End an engine process. Its agent reports the death to the API server, unless the link is
        cut."""
        engine.is_running = False
        wire = engine.wire
        if wire is not None and not wire.is_cut:
            wire.is_broken = True
            engine.wire = None
            self.later(self.rng.uniform(*LATENCY_S), lambda: self._note_death(engine, death))

    def _note_death(self, engine: _Engine, death: Death) -> None:
        if self._engines.get(engine.name) is not engine:
            return
        del self._engines[engine.name]
        self.dispatcher.on_death(engine.name, death)
        self.later(RESTART_S, lambda: self._start(engine.name))

    def _fail(self) -> None:
        """Inject a random fault, and schedule the next one."""
        if self._is_ending:
            return
        config, rng = self.config, self.rng
        kinds = {
            self._kill: config.killed,
            self._crash: config.crashed,
            self._cut: config.cut,
            self._drain: config.drained,
        }
        running = [each for each in self._engines.values() if each.is_running and each.wire]
        if running:
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            kind(rng.choice(running))
        rate = sum(kinds.values()) * config.num_engines
        self.later(rng.expovariate(rate), self._fail)

    def _kill(self, engine: _Engine) -> None:
        self.report.counts["killed"] += 1
        activity = Activity(Doing.COMPUTING, engine.busy_with())
        self.die(engine, Death(activity, -int(signal.SIGKILL), num_oom_kills=0))

    def _crash(self, engine: _Engine) -> None:
        """Crash an engine in a step without any request being the cause.

        An engine that retries only one suspected request is not crashed: the dispatcher would blame
        this request for a second crash.
        """
        trial = self.dispatcher.trials.attribution.trial
        if trial is not None and trial.request_id in engine.busy_with():
            return
        self.report.counts["crashed"] += 1
        activity = Activity(Doing.COMPUTING, engine.busy_with())
        self.die(engine, Death(activity, -int(signal.SIGABRT)))

    def _cut(self, engine: _Engine) -> None:
        self.report.counts["cut"] += 1
        wire = engine.wire
        assert wire is not None
        wire.is_cut = True
        self.later(HEARTBEAT_S, lambda: self.close_connection(engine, wire))

    def close_connection(self, engine: _Engine, wire: _Wire) -> None:
        """Close a connection at both ends. Called after a missed heartbeat or a missing frame."""
        if wire.is_broken:
            return
        wire.is_broken = True
        engine.wire = None
        engine.forget_all()
        if self._engines.get(engine.name) is not engine:
            return
        replica = self.dispatcher.replicas.get(engine.name)
        held = [] if replica is None else list(replica.requests)
        self.dispatcher.on_death(engine.name, Death(Activity(Doing.IDLE), None, is_lost=True))
        self.later(self.rng.uniform(0.1, 2.0), lambda: self._reconnect(engine, held))

    def _reconnect(self, engine: _Engine, held: list[str]) -> None:
        if engine.is_running:
            self.dispatcher.undo_losses(held)
            self._connect(engine)
        else:
            self._start(engine.name)

    def _drain(self, engine: _Engine) -> None:
        self.report.counts["drained"] += 1
        self.dispatcher.move_all(engine.name)
        self.later(0.2, lambda: self.dispatcher.set_accepting(engine.name, True))


def run(config: FailoverConfig) -> FailoverReport:
    """Run one simulation. Raises FailoverError, with the seed, if a check fails."""
    try:
        return FailoverWorld(config).run()
    except AssertionError as error:
        raise FailoverError(f"seed {config.seed}: {error}") from error


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster.unreliable_links")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--num-events", type=int, default=1_000_000, help="in all")
    parser.add_argument("--num-engines", type=int, default=0, help="0: from 1 to 8")
    arguments = parser.parse_args(words)
    configure("error")  # without a line for each fault
    total: Counter[str] = Counter()
    seed = arguments.seed
    while total["events"] < arguments.num_events:
        num_engines = arguments.num_engines or 1 + seed % 8
        report = run(FailoverConfig(seed=seed, num_engines=num_engines))
        total += report.counts
        seed += 1
    print(f"{seed - arguments.seed} runs: {FailoverReport(total)}")
    print("every request was answered once, with the tokens that it gets alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
