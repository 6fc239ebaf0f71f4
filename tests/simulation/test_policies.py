"""What each policy promises, held to by the real scheduler on a virtual clock.

`pytest -rP tests/simulation/test_policies.py` prints the figures that docs/memory.md quotes.
"""

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids

import pytest
from tests.registering import restored

from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.admission import MAX_OVERTAKEN
from quire.core.scheduling.policy import (
    POLICIES,
    DeadlinePolicy,
    FairPolicy,
    FcfsPolicy,
    LongestPrefixPolicy,
    Policy,
    PriorityPolicy,
    ShortestFirstPolicy,
)
from quire.core.sequence import Sequence
from quire.core.step import StepPlan
from quire.simulation.simulator import Simulator
from quire.simulation.workload import Arrival, SimulationConfig, draw_arrivals

Tokens = dict[str, float]  # by tenant


class World(Simulator):
    """A simulation of given requests that notes what becomes of each, by its id.

    started_in: the step of its first admission. first_token_s, ended_s: on the virtual clock.
    tokens: by (id, branch). moments: after each step, what each tenant was served (a prompt token
    counts 1, an output token 2) and how many of its requests wait for their first admission.
    """

    def __init__(
        self, config: SimulationConfig, arrivals: Iterable[Arrival], until_s: float = math.inf
    ) -> None:
        """until_s: then all clients go away."""
        super().__init__(config)
        self._arrivals = iter(arrivals)
        self._next_arrival = next(self._arrivals, None)
        self.until_s = until_s
        self.sequences: dict[str, Sequence] = {}
        self.started_in: dict[str, int] = {}
        self.first_token_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.moments: list[tuple[Tokens, Tokens]] = []
        self._served: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.running_set.stats.num_preemptions

    @property
    def output_tokens_per_s(self) -> float:
        return self.report.num_output_tokens / self.clock.now_s

    def waited_s(self, name: str) -> float:
        """From arrival to the first token."""
        return self.first_token_s[name] - self.sequences[name].arrival_s

    def num_started_before(self, name: str, *, of_later_than_s: float) -> int:
        """How many that came later than that were admitted in a step before this one was."""
        return sum(
            step < self.started_in[name] and self.sequences[other].arrival_s > of_later_than_s
            for other, step in self.started_in.items()
        )

    def _admit_arrivals(self) -> None:
        if self.clock.now_s >= self.until_s:
            self._next_arrival = None
            for name in self.sequences:
                client = self.clients.find((name, 0))
                if client is not None:
                    self.engine.abort(name)
                    self.clients.end_aborted(client)
        super()._admit_arrivals()

    def _add(self, arrival: Arrival) -> None:
        super()._add(arrival)
        request = arrival.request
        client = self.clients.find((request.request_id, 0))
        assert client is not None, "refused"
        self.sequences[request.request_id] = client.sequence
        self._num_waiting[request.tenant] += 1

    def on_plan(self, plan: StepPlan) -> float:
        for sequence in self.scheduler.running:
            if sequence.request_id not in self.started_in:
                self.started_in[sequence.request_id] = plan.step_id
                self._num_waiting[sequence.tenant] -= 1
        self.moments.append((dict(self._served), dict(self._num_waiting)))
        return super().on_plan(plan)

    def _receive(self, outputs: list[SequenceOutput]) -> None:
        super()._receive(outputs)
        for output in outputs:
            name, sequence = output.request_id, self.sequences[output.request_id]
            if name not in self.first_token_s:
                self.first_token_s[name] = self.clock.now_s
                num_computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
                self._served[sequence.tenant] += num_computed
            self._served[sequence.tenant] += 2 * len(output.token_ids)
            self.tokens.setdefault((name, output.branch_index), []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended_s[name] = self.clock.now_s


def simulate(
    policy: Callable[[], Policy],
    arrivals: Iterable[Arrival],
    until_s: float = math.inf,
    **options: object,
) -> World:
    """Run to the end; raises where a law is broken, a wrong token included."""
    given: dict[str, object] = {"check_every": 50, "max_num_waiting": 100_000, "end_rate": 0.0}
    with restored(POLICIES):
        POLICIES.register("given", policy)
        config = SimulationConfig(policy="given", **{**given, **options})  # type: ignore[arg-type]
        world = World(config, arrivals, until_s)
    world.run()
    return world


class Author:
    """Makes up requests; equal seeds make equal ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrivals: list[Arrival] = []

    def ask(
        self,
        at_s: float,
        num_prompt: int,
        num_outputs: int,
        *,
        prefix: Ids[int] = (),
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> str:
        """Returns its id. prefix: what its prompt begins with, beyond num_prompt tokens."""
        name = f"{tenant}{len(self.arrivals)}"
        request = Request(
            name,
            [*prefix, *self.tokens(num_prompt)],
            DecodingParams(num_outputs, seed=len(self.arrivals)),
            priority=priority,
            tenant=tenant,
            deadline_s=deadline_s,
        )
        self.arrivals.append(Arrival(request, at_s, None, False))
        return name

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def times(self, per_s: float, seconds: float) -> Iterable[float]:
        """Arrivals of a Poisson process."""
        now_s = self.rng.expovariate(per_s)
        while now_s < seconds:
            yield now_s
            now_s += self.rng.expovariate(per_s)


# ---- fair ---------------------------------------------------------------------------------------


@functools.cache
def two_tenants(policy: Callable[[], Policy], overlap: int = 0) -> tuple[list[Tokens], float]:
    """One tenant sends 5 times as many requests as the other, each of twice the weight, if with
    shorter prompts; each alone is more than half of what fits.

    Returns what they were served in each step in which requests of both wait, counted from the
    first, and the tokens that the pool has room for.
    """
    author = Author(3)
    for at_s in author.times(per_s=24, seconds=16):
        author.ask(at_s, author.rng.randint(20, 40), author.rng.randint(4, 12), tenant="light")
        for _ in range(5):
            author.ask(at_s, author.rng.randint(8, 20), author.rng.randint(30, 50), tenant="heavy")
    world = simulate(policy, author.arrivals, until_s=16.0, overlap=overlap, num_blocks=64)
    both = [
        served
        for served, waiting in world.moments
        if all(waiting.get(t) for t in ("light", "heavy"))
    ]
    assert len(both) > 0.95 * len(world.moments) > 500, "both are to wait nearly all the time"
    first = both[0]
    gains = [
        {t: served_then.get(t, 0) - first.get(t, 0) for t in ("light", "heavy")}
        for served_then in both
    ]
    return gains, 64 * 4


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_tenant_with_ten_times_the_load_gets_no_more_service(overlap: int) -> None:
    gains, num_slots = two_tenants(FairPolicy, overlap)
    light, heavy = gains[-1]["light"], gains[-1]["heavy"]
    print(f"fair, overlap {overlap}: {light} and {heavy} weighted tokens")
    assert abs(light - heavy) < 0.05 * max(light, heavy)
    # The bound of the virtual token counter, at any moment (Sheng et al., theorem 4.4).
    bound = 2 * max(1.0 * 40, 2.0 * num_slots)
    assert max(abs(gain["light"] - gain["heavy"]) for gain in gains) < bound


def test_first_come_first_served_gives_by_load() -> None:
    gains, _ = two_tenants(FcfsPolicy)
    light, heavy = gains[-1]["light"], gains[-1]["heavy"]
    print(f"fcfs: {light} and {heavy} weighted tokens")
    assert heavy > 5 * light


# ---- priority -----------------------------------------------------------------------------------

AGEING_S = 2.0


@functools.cache
def overloaded_by_urgent_ones(ageing_s: float, overlap: int = 0) -> World:
    """More than what fits, for 15 s; 1 of 10 is of a lower priority than the others."""
    author = Author(0)
    for at_s in author.times(per_s=32, seconds=15):
        priority = author.rng.choice((1, 3)) if author.rng.random() < 0.1 else 0
        num_prompt, num_outputs = author.rng.randint(1, 40), author.rng.randint(5, 30)
        author.ask(at_s, num_prompt, num_outputs, priority=priority)
    policy = functools.partial(PriorityPolicy, ageing_s)
    return simulate(policy, author.arrivals, overlap=overlap, num_blocks=64)


def longest_waits(world: World) -> dict[int, float]:
    """By priority."""
    waits: dict[int, float] = {}
    for name, sequence in world.sequences.items():
        waited_s = world.waited_s(name)
        waits[sequence.priority] = max(waits.get(sequence.priority, 0.0), waited_s)
    return waits


def num_late(world: World, name: str) -> int:
    """How many were admitted before it though they came after the moment from which on, with
    ageing, nobody new outranks it."""
    sequence = world.sequences[name]
    after_s = sequence.arrival_s + sequence.priority * AGEING_S
    return world.num_started_before(name, of_later_than_s=after_s)


@pytest.mark.parametrize("overlap", [0, 1])
def test_ageing_bounds_the_waiting_of_low_priorities(overlap: int) -> None:
    world = overloaded_by_urgent_ones(AGEING_S, overlap)
    for name, sequence in world.sequences.items():
        assert num_late(world, name) <= sequence.num_overtaken <= MAX_OVERTAKEN
    waits = longest_waits(world)
    print(f"priority, ageing_s {AGEING_S}, overlap {overlap}:", _seconds(waits))
    for priority in (1, 3):
        # As if it had come so much later as one of the highest priority.
        assert waits[priority] < priority * AGEING_S + waits[0] + 0.5


def test_without_ageing_low_priorities_wait_for_the_end_of_the_load() -> None:
    world = overloaded_by_urgent_ones(math.inf)
    waits = longest_waits(world)
    print("priority, no ageing:", _seconds(waits))
    assert max(num_late(world, name) for name in world.sequences) > 4 * MAX_OVERTAKEN
    assert all(waits[priority] > 12 > 3 * AGEING_S + waits[0] for priority in (1, 3))


def _seconds(waits: dict[int, float]) -> str:
    return ", ".join(f"{key}: {wait:.1f} s" for key, wait in sorted(waits.items()))


# ---- longest prefix -----------------------------------------------------------------------------

WAIT_TOKENS_PER_S = 40.0


@functools.cache
def chats(policy: Callable[[], Policy], num_prefixes: int, per_s: float) -> World:
    """More than what fits, for 9 s. Prompts begin with one of the prefixes, of which the pool has
    room for seven beside nothing else, but a tenth have nothing in common with anybody."""
    author = Author(0)
    prefixes = [author.tokens(48) for _ in range(num_prefixes)]
    for at_s in author.times(per_s, seconds=9):
        if author.rng.random() < 0.1:
            author.ask(at_s, author.rng.randint(30, 60), author.rng.randint(4, 12), tenant="alone")
            continue
        prefix = author.rng.choice(prefixes)
        author.ask(at_s, author.rng.randint(2, 10), author.rng.randint(4, 12), prefix=prefix)
    return simulate(policy, author.arrivals, num_blocks=96, max_num_batched_tokens=64)


def longest_prefix(wait_tokens_per_s: float) -> Callable[[], Policy]:
    return functools.partial(LongestPrefixPolicy, wait_tokens_per_s)


def mean_wait_s(world: World) -> float:
    return sum(map(world.waited_s, world.sequences)) / len(world.sequences)


def hit_rate(world: World) -> float:
    return world.report.num_hit_tokens / world.report.num_query_tokens


def longest_wait_alone_s(world: World) -> float:
    """Of those with nothing in common with anybody."""
    return max(
        world.waited_s(name)
        for name, sequence in world.sequences.items()
        if sequence.tenant == "alone"
    )


def test_longest_prefix_hits_more_and_answers_sooner() -> None:
    fcfs, ours = (
        chats(policy, num_prefixes=16, per_s=60)
        for policy in (FcfsPolicy, longest_prefix(WAIT_TOKENS_PER_S))
    )
    for name, world in (("fcfs", fcfs), ("longest_prefix", ours)):
        print(f"{name}: hit rate {hit_rate(world):.3f}, mean wait {mean_wait_s(world):.2f} s")
    assert hit_rate(ours) > 1.3 * hit_rate(fcfs)
    assert mean_wait_s(ours) < 0.75 * mean_wait_s(fcfs)


def test_longest_prefix_starves_no_request() -> None:
    """Two prefixes are always in the cache, and those who have them are more than what fits."""
    ours, unbounded = (
        chats(longest_prefix(bound), num_prefixes=2, per_s=90)
        for bound in (WAIT_TOKENS_PER_S, 1e-9)
    )
    window_s = ours.config.max_model_len / WAIT_TOKENS_PER_S
    for name, sequence in ours.sequences.items():
        num_late = ours.num_started_before(name, of_later_than_s=sequence.arrival_s + window_s)
        assert num_late <= sequence.num_overtaken <= MAX_OVERTAKEN
    waits = longest_wait_alone_s(ours), longest_wait_alone_s(unbounded)
    print(f"longest wait of a prompt like no other: {waits[0]:.1f} s, {waits[1]:.1f} s unbounded")
    assert waits[0] < 9 < waits[1], "the load ends after 9 s"


# ---- shortest first -----------------------------------------------------------------------------


@functools.cache
def prompts_of_any_length(policy: Callable[[], Policy]) -> World:
    """Short and long prompts at more than the rate that fits, for 9 s."""
    author = Author(0)
    for at_s in author.times(45, seconds=9):
        author.ask(at_s, author.rng.choice((3, 10, 30, 90)), author.rng.randint(2, 8))
    return simulate(policy, author.arrivals, num_blocks=96, max_num_batched_tokens=32)


def test_shortest_first_answers_sooner_and_starves_no_request() -> None:
    fcfs, ours = (
        prompts_of_any_length(policy)
        for policy in (FcfsPolicy, functools.partial(ShortestFirstPolicy, WAIT_TOKENS_PER_S))
    )
    for name, world in (("fcfs", fcfs), ("shortest_first", ours)):
        print(f"{name}: mean wait {mean_wait_s(world):.2f} s")
    assert mean_wait_s(ours) < 0.7 * mean_wait_s(fcfs)
    window_s = ours.config.max_model_len / WAIT_TOKENS_PER_S
    for name, sequence in ours.sequences.items():
        num_late = ours.num_started_before(name, of_later_than_s=sequence.arrival_s + window_s)
        assert num_late <= sequence.num_overtaken <= MAX_OVERTAKEN


# ---- deadline -----------------------------------------------------------------------------------


@functools.cache
def with_deadlines(policy: Callable[[], Policy], per_s: float) -> tuple[float, World]:
    """Returns the share of deadlines that are met."""
    author = Author(0)
    for at_s in author.times(per_s, seconds=12):
        deadline_s = author.rng.choice((1.0, 2.0, 4.0, 8.0))
        num_prompt, num_outputs = author.rng.randint(1, 40), author.rng.randint(5, 30)
        author.ask(at_s, num_prompt, num_outputs, deadline_s=deadline_s)
    world = simulate(policy, author.arrivals, num_blocks=96)
    num_met = sum(
        world.ended_s[name] <= (sequence.deadline_s or 0)
        for name, sequence in world.sequences.items()
    )
    return num_met / len(world.sequences), world


@pytest.mark.parametrize(("per_s", "gain"), [(30, 1.3), (40, 1.7)])
def test_more_deadlines_are_met_under_overload(per_s: float, gain: float) -> None:
    fcfs, _ = with_deadlines(FcfsPolicy, per_s)
    ours, _ = with_deadlines(DeadlinePolicy, per_s)
    print(f"deadlines met at {per_s} a second: fcfs {fcfs:.1%}, deadline {ours:.1%}")
    assert ours > gain * fcfs


# ---- growth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [(60, 60), (5, 60)])
def test_predicted_growth_makes_preemptions_rare(num_outputs: tuple[int, int]) -> None:
    """A steady overload; a pool for 7 sequences at their longest, or 11 at their mean."""
    author = Author(0)
    for at_s in author.times(per_s=30, seconds=10):
        author.ask(at_s, author.rng.randint(4, 24), author.rng.randint(*num_outputs))
    ours, without = (
        simulate(
            FcfsPolicy,
            author.arrivals,
            forecasts=forecasts,
            num_blocks=128,
            max_num_seqs=32,
            max_num_batched_tokens=64,
        )
        for forecasts in (True, False)
    )
    for name, world in (("forecasts", ours), ("no forecasts", without)):
        print(
            f"outputs {num_outputs}, {name}: {world.num_preemptions} preemptions of"
            f" {len(world.sequences)} requests, {world.output_tokens_per_s:.0f} tokens/s"
        )
    assert ours.num_preemptions < 0.3 * without.num_preemptions
    assert ours.num_preemptions < 0.1 * len(ours.sequences)
    assert ours.output_tokens_per_s > 0.99 * without.output_tokens_per_s


# ---- overtaking ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("forecasts", [True, False])
def test_a_large_one_lets_a_bounded_number_pass(forecasts: bool, overlap: int) -> None:
    """Many small ones come before and after one that needs 40 of 64 blocks."""
    author = Author(0)
    for _ in range(12):
        author.ask(0.0, 10, author.rng.randint(4, 14))
    large = author.ask(0.0, 150, 10)
    for _ in range(100):
        author.ask(0.0, 10, author.rng.randint(4, 14))
    world = simulate(
        FcfsPolicy,
        author.arrivals,
        forecasts=forecasts,
        overlap=overlap,
        num_blocks=64,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=200,
    )
    order = world.sequences[large].order
    num_passed = sum(
        step < world.started_in[large] and world.sequences[name].order > order
        for name, step in world.started_in.items()
    )
    assert num_passed == world.sequences[large].num_overtaken == MAX_OVERTAKEN


# ---- all ----------------------------------------------------------------------------------------


def test_tokens_are_the_same_under_every_policy() -> None:
    """Branches, beams and followers in a pool that is too small for them."""
    config = SimulationConfig(
        num_requests=60,
        num_blocks=40,
        abort_rate=0.0,
        beam_rate=0.1,
        near_rate=0.3,
        repeat_rate=0.2,
        num_branches=(1, 3),
        deadline_rate=0.5,
        max_num_waiting=1000,
    )
    arrivals = list(draw_arrivals(config))
    tokens: list[dict[tuple[str, int], list[int]]] = []
    plans: set[str] = set()
    for name in sorted(POLICIES):
        world = World(dataclasses.replace(config, policy=name), arrivals)
        world.run()
        tokens.append(world.tokens)
        plans.add(world.report.digest)
    assert len(plans) == len(POLICIES), "each of them plans otherwise"
    assert len(tokens[0]) > 60 and all(found == tokens[0] for found in tokens)
