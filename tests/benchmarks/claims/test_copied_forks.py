"""Memory in which each fork has its own copy: the same tokens, and no block with two holders."""

import random

import pytest
from benchmarks.claims.copied_forks import CopiedForksManager, copied_forks
from tests.core.harness import Harness, make_groups

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.errors import ConfigurationError
from quire.simulation.fakes.fake_model import FakeModel

BLOCK_SIZE = 16


def make_memory(kind: type[KVCacheManager], num_groups: int = 1) -> KVCacheManager:
    config = KVCacheConfig(make_groups(num_groups), 120, BLOCK_SIZE, enable_prefix_caching=False)
    return kind(config)


def check_no_sharing(harness: Harness) -> None:
    """Of the sequences that compute in the step that was just planned."""
    pool, deferred = harness.memory.pool, harness.memory.deferred
    for sequence in harness.scheduler.running:
        if sequence.num_pending_tokens:
            for block in [block for table in sequence.block_tables for block in table]:
                assert pool.ref_count[block] - deferred.num_copied_from[block] == 1, sequence


@pytest.mark.parametrize("num_groups", [1, 2])
def test_beams_find_the_same_without_sharing_a_block(num_groups: int) -> None:
    """With memory for a few searches at a time, so that some are preempted."""
    memory = make_memory(CopiedForksManager, num_groups)
    harness = Harness(memory, max_num_seqs=16, budget=64, model=FakeModel(end_rate=0.02))
    chance = random.Random(7)
    for index in range(8):
        params = DecodingParams(chance.randint(8, 60), beam_width=chance.randint(2, 4))
        harness.add(f"r{index}", chance.randint(1, 40), params=params)
    while harness.scheduler.has_unfinished:
        harness.launch()
        check_no_sharing(harness)
        harness.land()
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions > 0
    assert memory.pool.num_free == 120


def test_a_fork_copies_full_blocks_too() -> None:
    copied: dict[type[KVCacheManager], int] = {}
    for kind in (KVCacheManager, CopiedForksManager):
        harness = Harness(make_memory(kind), max_num_seqs=4)
        harness.add("r", 4 * BLOCK_SIZE + 3, params=DecodingParams(2, beam_width=2))
        while not (plan := harness.step()).forks:
            pass
        copied[kind] = len(plan.copies)
        harness.run()
    assert copied == {KVCacheManager: 1, CopiedForksManager: 5}


@pytest.mark.parametrize(
    ("kind", "window", "caching", "text"),
    [
        (KVKind.FULL, None, True, "enable_prefix_caching is True"),
        (KVKind.WINDOW, 32, False, "windows or states; compare another"),
    ],
)
def test_memory_that_it_can_not_copy_is_refused(
    kind: KVKind, window: int | None, caching: bool, text: str
) -> None:
    config = KVCacheConfig((KVGroup((0,), kind, 64, window),), 8, BLOCK_SIZE, caching)
    with pytest.raises(ConfigurationError, match=text):
        copied_forks(config, 128)
