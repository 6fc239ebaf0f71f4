"""The whole memory under random operations, checked against a plain model after each of them."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.memory_world import DOMAINS, World

from quire.core.sequence import Sequence

INDICES = st.integers(0, 7)
TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12)


class MemoryMachine(RuleBasedStateMachine):
    """Prompts over two tokens, so that prefixes are often equal, in a pool that is often full."""

    @initialize(
        num_blocks=st.integers(3, 20),
        size=st.sampled_from([1, 2, 4]),
        num_groups=st.integers(1, 3),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, size: int, num_groups: int, caching: bool) -> None:
        self.world = World(num_blocks, size, num_groups, caching)

    @rule(
        chunks=st.dictionaries(INDICES, st.integers(1, 9)),
        prompts=st.lists(PROMPTS, max_size=2),
        domain=st.sampled_from(DOMAINS),
        prompt_logprobs=st.sampled_from([False, False, True]),
    )
    def admit(
        self, chunks: dict[int, int], prompts: list[list[int]], domain: str, prompt_logprobs: bool
    ) -> None:
        newcomers = [self.world.new(prompt, domain, prompt_logprobs) for prompt in prompts]
        self.world.launch(chunks if self.world.live else {}, 0, newcomers)

    @precondition(lambda self: self.world.live)
    @rule(chunks=st.dictionaries(INDICES, st.integers(1, 9)), num_extra=st.integers(0, 2))
    def launch(self, chunks: dict[int, int], num_extra: int) -> None:
        self.world.launch(chunks, num_extra)

    @precondition(lambda self: self.world.in_flight)
    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=3))
    def land(self, token_ids: list[int]) -> None:
        self.world.land(token_ids)

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def fork_now(self, index: int) -> None:
        self.world.join(self.chosen(index))

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def fork_later(self, index: int) -> None:
        self.world.fork_waiting(self.chosen(index))

    @precondition(lambda self: self.world.waiting or self.world.live)
    @rule(chunks=st.dictionaries(INDICES, st.integers(1, 9)), first=INDICES)
    def resume(self, chunks: dict[int, int], first: int) -> None:
        resting = self.world.resting()
        self.world.launch(chunks if self.world.live else {}, 0, resting[first : first + 2])

    @precondition(lambda self: len(self.world.live) > 1)
    @rule(dead=INDICES, parent=INDICES)
    def refork(self, dead: int, parent: int) -> None:
        self.world.refork(self.chosen(dead), self.chosen(parent))

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES, num_cut=st.integers(0, 4))
    def preempt(self, index: int, num_cut: int) -> None:
        self.world.cut(self.chosen(index), num_cut)

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def take_reserve(self, index: int) -> None:
        self.world.cut_reserve(self.chosen(index))

    @precondition(lambda self: self.world.live)
    @rule(index=INDICES)
    def free(self, index: int) -> None:
        self.world.free(self.chosen(index))

    @rule()
    def fail(self) -> None:
        self.world.recover()

    @rule()
    def clear_cache(self) -> None:
        self.world.memory.prefixes.clear()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()

    def chosen(self, index: int) -> Sequence:
        return self.world.live[index % len(self.world.live)]


MemoryMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=100, deadline=None, database=None
)
TestMemoryMachine = MemoryMachine.TestCase


def act(world: World, rng: random.Random) -> None:
    """One random operation, most often those that requests are made of."""
    live, kind = world.live, rng.random()
    one = rng.choice(live) if live else None
    if one is None or kind < 0.45:
        chunks = {index: rng.randint(1, 9) for index in range(len(live)) if rng.random() < 0.8}
        newcomers = rng.sample(world.resting(), min(2, len(world.resting())))
        if one is None or kind < 0.15:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            newcomers = [world.new(prompt, rng.choice(DOMAINS), rng.random() < 0.2)]
        world.launch(chunks, rng.choice([0, 0, 1, 2]), newcomers)
    elif kind < 0.7:
        if world.in_flight:
            world.land([rng.randrange(2) for _ in range(3)])
    elif kind < 0.78:
        world.join(one)
    elif kind < 0.84:
        world.fork_waiting(one)
    elif kind < 0.88:
        world.refork(one, rng.choice(live))
    elif kind < 0.92:
        world.cut(one, rng.randint(0, 3))
    elif kind < 0.95:
        world.cut_reserve(one)
    elif kind < 0.985:
        world.free(one)
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
