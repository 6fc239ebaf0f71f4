"""The whole memory under random operations; a plain dict says what each block really contains."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.harness import make_memory, make_sequence

from quire.core import invariants
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.sequence import Sequence

DOMAINS = ("a", "b")
Content = tuple[int, str, tuple[int, ...]]
"""(KV group, cache domain, the whole prefix up to the block's end)."""


class Memory:
    """A manager with sequences in it, and what was truly written into each block."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int) -> None:
        self.memory: KVCacheManager = make_memory(num_blocks, block_size, num_groups)
        self.live: list[tuple[Sequence, str]] = []
        self.written: dict[int, Content] = {}
        self.step_id = 0

    def admit(self, token_ids: list[int], domain: str) -> None:
        memory = self.memory
        sequence = make_sequence(memory, token_ids, domain=domain)
        match = memory.match(sequence)
        assert match.num_tokens < len(token_ids)
        for group, ids in enumerate(match.blocks):
            for index, block in enumerate(ids):
                prefix = tuple(token_ids[: (index + 1) * memory.block_size])
                assert self.written.get(block) == (group, domain, prefix), "a wrong hit"
        if not memory.can_admit(sequence, match, 0):
            return
        memory.admit(sequence, match)
        sequence.row = 0
        self.live.append((sequence, domain))
        self.write(sequence, domain)

    def write(self, sequence: Sequence, domain: str) -> None:
        """Compute all tokens; every block that is not shared gets its true content."""
        size = self.memory.block_size
        first = sequence.num_computed_tokens // size
        for group, table in enumerate(sequence.block_tables):
            for index in range(first, len(table)):
                assert self.memory.pool.ref_count[table[index]] == 1, "a write into a shared block"
                prefix = tuple(sequence.token_ids[: (index + 1) * size])
                self.written[table[index]] = (group, domain, prefix)
        sequence.num_computed_tokens = len(sequence.token_ids)

    def decode(self, index: int, token_id: int) -> None:
        sequence, domain = self.live[index]
        sequence.token_ids.append(token_id)
        if self.memory.grow(sequence, len(sequence.token_ids)) is None:
            sequence.token_ids.pop()
            return
        self.write(sequence, domain)

    def publish(self, index: int) -> None:
        sequence = self.live[index][0]
        self.memory.publish(sequence, sequence.num_computed_tokens)

    def free(self, index: int, in_flight: bool) -> None:
        sequence, _ = self.live.pop(index)
        sequence.row = None
        self.memory.free(sequence, self.step_id + 1 if in_flight else None)

    def end_step(self) -> None:
        self.step_id += 1
        self.memory.end_step(self.step_id)

    def check(self) -> None:
        invariants.check_memory(self.memory, [sequence for sequence, _ in self.live])
        pool, size = self.memory.pool, self.memory.block_size
        for block, key in enumerate(pool.content):
            if key is not None:
                group, _, prefix = self.written[block]
                assert group == key[0] and len(prefix) % size == 0, "a partial block was published"


class MemoryMachine(RuleBasedStateMachine):
    """Sequences over two tokens, so that prefixes are often equal, in a pool that is often full."""

    indices = st.integers(0, 7)

    @initialize(
        num_blocks=st.integers(3, 14), size=st.sampled_from([1, 2, 4]), num_groups=st.integers(1, 3)
    )
    def start(self, num_blocks: int, size: int, num_groups: int) -> None:
        self.it = Memory(num_blocks, size, num_groups)

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        domain=st.sampled_from(DOMAINS),
    )
    def admit(self, token_ids: list[int], domain: str) -> None:
        self.it.admit(token_ids, domain)

    @rule(index=indices, token_id=st.integers(0, 1))
    def decode(self, index: int, token_id: int) -> None:
        self._with(index, lambda chosen: self.it.decode(chosen, token_id))

    @rule(index=indices)
    def publish(self, index: int) -> None:
        self._with(index, self.it.publish)

    @rule(index=indices, in_flight=st.booleans())
    def free(self, index: int, in_flight: bool) -> None:
        self._with(index, lambda chosen: self.it.free(chosen, in_flight))

    @rule()
    def end_step(self) -> None:
        self.it.end_step()

    @rule()
    def clear_cache(self) -> None:
        self.it.memory.clear_cache()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "it"):
            self.it.check()

    def teardown(self) -> None:
        if hasattr(self, "it"):
            while self.it.live:
                self.it.free(0, in_flight=True)
            self.it.end_step()
            self.it.check()
            assert self.it.memory.pool.num_held == 0

    def _with(self, index: int, act: Callable[[int], None]) -> None:
        if self.it.live:
            act(index % len(self.it.live))


MemoryMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, database=None
)
TestMemoryMachine = MemoryMachine.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_long_random_runs(seed: int) -> None:
    """Longer than Hypothesis goes, and without shrinking: 400 operations on one memory."""
    rng = random.Random(seed)
    it = Memory(rng.randint(4, 30), rng.choice([1, 2, 4]), rng.randint(1, 3))
    for _ in range(400):
        kind = rng.random()
        index = rng.randrange(len(it.live)) if it.live else None
        if kind < 0.3 or index is None:
            it.admit([rng.randrange(2) for _ in range(rng.randint(1, 14))], rng.choice(DOMAINS))
        elif kind < 0.6:
            it.decode(index, rng.randrange(2))
        elif kind < 0.75:
            it.publish(index)
        elif kind < 0.9:
            it.free(index, rng.random() < 0.5)
        elif kind < 0.99:
            it.end_step()
        else:
            it.memory.clear_cache()
        it.check()
