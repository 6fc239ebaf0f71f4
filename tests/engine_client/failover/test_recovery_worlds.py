"""Random worlds of requests that kill, kills from outside and clients that leave: who is blamed.

The real dispatcher before a model of an engine process, which dies in the step that computes a
killer's n-th token, and at random moments of something else.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.engine_client.fleet_world import LIMITS

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.messages import AbortRequest, AddRequest, Outputs, decode_to_engine
from quire.engine_client.one_engine import OnlyPlacement
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Cause, Death, RecoveryConfig, RestartBudget
from quire.errors import QuireError, RequestKillsEngineError

NUM_TOKENS = 12
STEP_S = 5.0
KILLED = -int(signal.SIGKILL)


class Client:
    """A sink that notes how its request ends."""

    def __init__(self, world: "World", name: str) -> None:
        self._world, self._name = world, name

    def on_output(self, output: SequenceOutput) -> None:
        pass

    def on_end(self, error: QuireError | None) -> None:
        assert self._name not in self._world.ends or self._world.ends[self._name] == "left"
        is_blamed = isinstance(error, RequestKillsEngineError)
        assert is_blamed or error is None
        self._world.ends.setdefault(self._name, "blamed" if is_blamed else "answered")


class Engine:
    """What an engine process has: the tokens of each branch of its requests."""

    def __init__(self) -> None:
        self.running: dict[str, dict[int, int]] = {}
        self.calls: list[Callable[[], None]] = []

    def send(self, frame: bytes) -> None:
        message = decode_to_engine(frame[4:])
        if isinstance(message, AddRequest):
            request = message.request
            branches = request.resumed or [(index, ()) for index in range(request.n)]
            self.running[request.request_id] = {index: len(past) for index, past in branches}
        elif isinstance(message, AbortRequest):
            self.running.pop(message.request_id, None)

    def call_between_steps(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def step(self, names: list[str]) -> Outputs:
        outputs = []
        for name in names:
            branches = self.running[name]
            is_last = max(branches.values()) >= NUM_TOKENS - 1
            reason = FinishReason.LENGTH if is_last else None
            for branch in branches:
                branches[branch] += 1
                outputs.append(SequenceOutput(name, branch, (7,), finish_reason=reason))
            if is_last:
                del self.running[name]
        return Outputs(outputs)


@dataclass
class World:
    """num_rows: requests in a step. killers: request -> (how many tokens it has when it kills, and
    how). Probabilities: outside: of a kill in a step; while_trying: of one where a request is on
    trial; pressure: of a kill for lack of memory that others use up; losses: that what a step
    brought is lost with the process; arriving: of the next request coming now; leaving: of a client
    leaving in a step. pair: requests that kill while both are in a step. counts: the system counts
    what it kills for lack of memory."""

    seed: int
    num_requests: int = 12
    num_rows: int = 64
    max_branches: int = 3
    killers: dict[str, tuple[int, Cause]] = field(default_factory=dict)
    outside: float = 0.0
    while_trying: float = 0.0
    pressure: float = 0.0
    losses: float = 0.0
    arriving: float = 0.9
    leaving: float = 0.0
    pair: tuple[str, str] | None = None
    counts: bool = True
    max_restarts: int = 5

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.dispatcher = FleetDispatcher(10**6, lambda: 0.0, OnlyPlacement())
        self.budget = RestartBudget(RecoveryConfig(max_restarts=self.max_restarts))
        self.waiting = [
            Request(f"r{i}", [1], DecodingParams(99), n=self.rng.randint(1, self.max_branches))
            for i in range(self.num_requests)
        ]
        self.ends: dict[str, str] = {}  # request -> "answered", "blamed", "left"
        self.deaths: Counter[Cause] = Counter()
        self.gave_up = False
        self.now_s = 0.0
        self.engine = Engine()
        self._start()

    def _start(self) -> None:
        self.engine = Engine()
        self.dispatcher.on_ready("", self.engine, LIMITS, {})

    def run(self) -> "World":
        for _ in range(20_000):
            if len(self.ends) == self.num_requests or self.gave_up:
                return self
            while self.waiting and self.rng.random() < self.arriving:
                request = self.waiting.pop(0)
                self.dispatcher.open([request], Client(self, request.request_id))
            self._step()
        raise AssertionError(f"{self.num_requests - len(self.ends)} requests have no end")

    def _step(self) -> None:
        self.now_s += STEP_S
        rows = list(self.engine.running)[: self.num_rows]
        death = self._death(rows)
        if death is None or (death.cause is Cause.OUTSIDE and self.rng.random() >= self.losses):
            self.dispatcher.on_message("", self.engine, self.engine.step(rows))
            self._leave(rows)
        if death is not None:
            self._die(death)

    def _death(self, rows: list[str]) -> Death | None:
        ids = frozenset(rows)
        computing = Activity(Doing.COMPUTING, ids)
        for name in rows:
            at, cause = self.killers.get(name, (999, Cause.CRASH))
            if max(self.engine.running[name].values()) >= at:
                return self._killed(cause, computing)
        if self.pair is not None and ids.issuperset(self.pair):
            return self._killed(Cause.CRASH, computing)
        is_trying = self.dispatcher.trials.attribution.trial is not None
        if rows and self.rng.random() < self.pressure:
            return self._killed(Cause.MEMORY, computing)
        if self.rng.random() < (self.while_trying if is_trying else self.outside):
            doing = self.rng.choice([computing, computing, Activity(Doing.IDLE)])
            return self._killed(Cause.OUTSIDE, doing)
        return None

    def _killed(self, cause: Cause, activity: Activity) -> Death:
        if cause is Cause.CRASH:
            return Death(activity, -int(signal.SIGSEGV), num_oom_kills=0)
        num_oom_kills = int(cause is Cause.MEMORY) if self.counts else None
        return Death(activity, KILLED, num_oom_kills=num_oom_kills)

    def _leave(self, rows: list[str]) -> None:
        for name in rows:
            if name not in self.ends and self.rng.random() < self.leaving:
                self.ends[name] = "left"
                self.dispatcher.abort(name)
        calls, self.engine.calls = self.engine.calls, []
        if self.rng.random() < 0.5:
            for call in calls:
                call()
        else:  # they come after the next step, unless the process has died by then
            self.engine.calls = calls

    def _die(self, death: Death) -> None:
        self.deaths[death.cause] += 1
        explained = self.dispatcher.on_death("", death)
        self.gave_up = self.budget.note_death(self.now_s, death, explained) is None
        self._start()

    @property
    def blamed(self) -> set[str]:
        return {name for name, end in self.ends.items() if end == "blamed"}


def killers_of(rng: random.Random, count: int, num_requests: int) -> dict[str, tuple[int, Cause]]:
    names = rng.sample([f"r{i}" for i in range(num_requests)], count)
    return {
        name: (rng.randint(0, 6), rng.choice([Cause.CRASH, Cause.CRASH, Cause.MEMORY]))
        for name in names
    }


@pytest.mark.parametrize("seed", range(100))
def test_only_requests_that_kill_are_blamed(seed: int) -> None:
    """However often somebody else kills the process as well, and above all during trials."""
    rng = random.Random(seed)
    killers = killers_of(rng, rng.randint(0, 2), 20)
    world = World(
        seed,
        num_requests=20,
        num_rows=rng.choice([4, 64]),
        killers=killers,
        outside=0.02,
        while_trying=0.3,
        losses=rng.choice([0.0, 0.5]),
        max_restarts=10**6,
    ).run()
    assert world.blamed == set(killers)
    kills = world.deaths[Cause.CRASH] + world.deaths[Cause.MEMORY]
    assert kills <= 4 * len(killers)  # three each; one more where memory runs out in two at once
    assert set(world.ends.values()) <= {"answered", "blamed"}


@pytest.mark.parametrize("counts", [True, False])
def test_memory_used_up_by_other_programs_blames_no_request(counts: bool) -> None:
    """Where the system counts nothing, kills from outside look the same.

    This is no certainty: somebody is blamed whom three of such kills hit, two of them on its trial,
    and nobody else meanwhile.
    """
    kind = {"pressure": 0.01} if counts else {"outside": 0.01, "while_trying": 0.01}
    num_deaths = 0
    for seed in range(100):
        world = World(seed, num_requests=20, counts=counts, **kind).run()
        assert world.blamed == set()
        num_deaths += world.deaths.total()
    assert num_deaths >= 10


@pytest.mark.parametrize("seed", range(10))
def test_a_lasting_lack_of_memory_ends_the_server_and_blames_no_request(seed: int) -> None:
    world = World(seed, num_requests=20, arriving=1.0, pressure=1.0).run()
    assert world.gave_up and world.blamed == set()


@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.MEMORY])
@pytest.mark.parametrize("seed", range(5))
def test_a_killer_among_500_costs_three_deaths(seed: int, cause: Cause) -> None:
    """Or two, if it crashes the engine and happens to be the first suspect."""
    rng = random.Random(seed)
    killer = f"r{rng.randrange(1, 500)}"
    world = World(seed, 500, killers={killer: (rng.randint(0, 9), cause)}).run()
    assert world.blamed == {killer} and not world.gave_up
    assert world.deaths.total() == 3
    assert Counter(world.ends.values()) == {"answered": 499, "blamed": 1}


@pytest.mark.parametrize("seed", range(20))
def test_killers_that_come_together_end_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    killers = {name: (at, Cause.CRASH) for name, (at, _) in killers_of(rng, 6, 40).items()}
    world = World(seed, num_requests=40, killers=killers).run()
    assert world.blamed == set(killers) and not world.gave_up
    assert 2 * len(killers) <= world.deaths.total() <= 3 * len(killers)


@pytest.mark.parametrize("seed", range(20))
def test_clients_that_leave_cause_no_blame(seed: int) -> None:
    rng = random.Random(seed)
    killers = killers_of(rng, 3, 20)
    world = World(
        seed, num_requests=20, killers=killers, leaving=0.05, outside=0.02, max_restarts=10**6
    ).run()
    assert world.blamed <= set(killers)
    assert all(world.ends[name] != "answered" for name in killers)


@pytest.mark.parametrize("seed", range(10))
def test_one_of_two_requests_that_kill_only_together_is_ended(seed: int) -> None:
    world = World(seed, num_requests=2, max_branches=1, pair=("r0", "r1")).run()
    assert len(world.blamed) == 1 and not world.gave_up
