"""The whole memory under random operations, checked against a plain model after each of them."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.memory.memory_truth import DOMAINS
from tests.core.memory.memory_world import World, beam_pairs

from quire.core.kv_groups import KVGroup
from quire.core.sequence import Sequence
from quire.simulation.workload import read_groups

HYBRIDS = (
    "full,window:3",
    "window:5",
    "full,state:2",
    "state:1",
    "latent,window:2,state:1",
    "full,window:6,latent,state:2",
)
Groups = int | tuple[KVGroup, ...]
INDICES = st.integers(0, 7)
TOKENS = st.integers(0, 1)
CHUNKS = st.integers(1, 9)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12)
SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), TOKENS), max_size=2)


class MemoryMachine(RuleBasedStateMachine):
    """Prompts over two tokens, so that prefixes are often equal, in a pool that is often full."""

    @initialize(
        num_blocks=st.integers(3, 20),
        size=st.sampled_from([1, 2, 4]),
        groups=st.one_of(st.integers(1, 3), st.sampled_from(HYBRIDS).map(read_groups)),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, size: int, groups: Groups, caching: bool) -> None:
        self.world = World(num_blocks, size, groups, caching)

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=2),
        domain=st.sampled_from(DOMAINS),
        prompt_logprobs=st.sampled_from([False, False, True]),
        chunk=CHUNKS,
        spans=SPANS,
    )
    def admit(
        self,
        prompts: list[list[int]],
        domain: str,
        prompt_logprobs: bool,
        chunk: int,
        spans: list[tuple[int, int, int]],
    ) -> None:
        newcomers = [self.world.new(prompt, domain, prompt_logprobs, spans) for prompt in prompts]
        self.world.launch(self.all_but(9, chunk), 0, newcomers)

    @precondition(lambda self: self.world.live)
    @rule(skipped=INDICES, chunk=CHUNKS, num_extra=st.integers(0, 2))
    def launch(self, skipped: int, chunk: int, num_extra: int) -> None:
        self.world.launch(self.all_but(skipped, chunk), num_extra)

    @precondition(lambda self: self.world.in_flight)
    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=3))
    def land(self, token_ids: list[int]) -> None:
        self.world.land(token_ids)

    @precondition(lambda self: self.world.live)
    @rule(count=st.integers(1, 4), token_ids=st.lists(TOKENS, min_size=1, max_size=3))
    def run_some(self, count: int, token_ids: list[int]) -> None:
        for _ in range(count):
            self.world.launch(self.all_but(9, 9))
            self.world.land(token_ids)
            self.world.check()

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def fork_now(self, index: int) -> None:
        self.world.join(self.chosen(index))

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def fork_later(self, index: int) -> None:
        self.world.fork_waiting(self.chosen(index))

    @precondition(lambda self: self.world.resting())
    @rule(skipped=INDICES, chunk=CHUNKS, first=INDICES)
    def resume(self, skipped: int, chunk: int, first: int) -> None:
        resting = self.world.resting()
        first %= len(resting)
        self.world.launch(self.all_but(skipped, chunk), 0, resting[first : first + 2])

    @precondition(lambda self: beam_pairs(self.world))
    @rule(index=st.integers(0, 20))
    def refork(self, index: int) -> None:
        pairs = beam_pairs(self.world)
        self.world.refork(*pairs[index % len(pairs)])

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES, num_cut=st.integers(0, 4))
    def preempt(self, index: int, num_cut: int) -> None:
        self.world.truncate(self.chosen(index), num_cut)

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES, is_end=st.booleans())
    def give_back(self, index: int, is_end: bool) -> None:
        (self.world.free if is_end else self.world.cut_reserve)(self.chosen(index))

    @rule(kind=st.sampled_from(["nothing", "nothing", "fail", "clear"]))
    def disturb(self, kind: str) -> None:
        if kind == "fail":
            self.world.recover()
        elif kind == "clear":
            self.world.memory.prefixes.clear()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()

    def all_but(self, skipped: int, chunk: int) -> dict[int, int]:
        """All live sequences but one compute up to `chunk` tokens."""
        return {index: chunk for index in range(len(self.world.live)) if index != skipped}

    def chosen(self, index: int) -> Sequence:
        return self.world.live[index % len(self.world.live)]


# The same histories wherever it runs; a longer search sets derandomize to False, and a seed.
MemoryMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=100, deadline=None, database=None, derandomize=True
)
TestMemoryMachine = MemoryMachine.TestCase


def act(world: World, rng: random.Random) -> None:
    """One random operation, most often those that requests are made of."""
    live, kind = world.live, rng.random()
    sequence = rng.choice(live) if live else None
    if sequence is None or kind < 0.45:
        chunks = {index: rng.randint(1, 9) for index in range(len(live)) if rng.random() < 0.8}
        newcomers = rng.sample(world.resting(), min(2, len(world.resting())))
        if sequence is None or kind < 0.15:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            drawn = [(rng.randrange(4), rng.randint(1, 6), rng.randrange(2)) for _ in range(2)]
            spans = drawn[: rng.randrange(3)]
            newcomers = [world.new(prompt, rng.choice(DOMAINS), rng.random() < 0.2, spans)]
        world.launch(chunks, rng.choice([0, 0, 1, 2]), newcomers)
    elif kind < 0.7:
        if world.in_flight:
            world.land([rng.randrange(2) for _ in range(3)])
    elif kind < 0.76:
        world.join(sequence)
    elif kind < 0.8:
        world.fork_waiting(sequence)
    elif kind < 0.88:
        pairs = beam_pairs(world)
        if pairs:
            world.refork(*rng.choice(pairs))
    elif kind < 0.91:
        world.truncate(sequence, rng.randint(0, 3))
    elif kind < 0.93:
        world.cut_reserve(sequence)
    elif kind < 0.98:
        world.free(sequence)
    elif kind < 0.995:
        world.recover()
    else:
        world.memory.prefixes.clear()


@pytest.mark.parametrize("seed", range(20))
def test_long_random_runs(seed: int) -> None:
    """Longer than Hypothesis goes, and without shrinking: 400 operations on one memory."""
    rng = random.Random(seed)
    caching = rng.random() < 0.8
    world = World(rng.randint(6, 40), rng.choice([1, 2, 4]), rng.randint(1, 3), caching)
    for _ in range(400):
        act(world, rng)
        world.check()
    world.finish()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", HYBRIDS)
def test_long_random_runs_of_hybrids(kinds: str, seed: int) -> None:
    rng = random.Random(f"{kinds} {seed}")
    world = World(rng.randint(16, 60), rng.choice([1, 2, 4]), read_groups(kinds), seed != 1)
    for _ in range(400):
        act(world, rng)
        world.check()
    world.finish()
