"""quire's side of the core's benchmark runs on the core as it is, and measures what it says."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager

GROUP = KVGroup((0,), KVKind.FULL, 64)
VLLM_SIDE = Path(__file__).parents[3] / "benchmarks" / "core" / "vllm_side.py"


@pytest.fixture
def core_quire(
    monkeypatch: pytest.MonkeyPatch, load_script: Callable[[str], ModuleType]
) -> ModuleType:
    """The side as a module, with each case called twice at most."""
    timing = load_script("benchmarks.core.timing")
    monkeypatch.setattr(timing, "MIN_TIMED_S", 1e-9)
    monkeypatch.setattr(timing, "settle", lambda: None)
    side = load_script("benchmarks.core.quire_side")
    monkeypatch.setattr(side, "settle", lambda: None)
    return side


REQUESTS = (
    "slot_lookup",
    "slots_of_batch",
    "take_release 1",
    "take_release 512",
    "take_publish_release 1024",
    "hash_prefix",
    "find_prefix",
    "hash_and_find_prefix",
    "step 100",
)


@pytest.mark.parametrize("request_line", REQUESTS)
def test_each_case_runs(core_quire: ModuleType, request_line: str) -> None:
    name, *sizes = request_line.split()
    timing = core_quire.CASES[name](*map(int, sizes))
    assert 0 < timing.cpu_ns <= 1.5 * timing.wall_ns + 1_000


def test_no_case_is_left_out(core_quire: ModuleType) -> None:
    assert {line.split()[0] for line in REQUESTS} == set(core_quire.CASES)


def test_both_sides_time_the_same_cases(core_quire: ModuleType) -> None:
    source = VLLM_SIDE.read_text()
    theirs = source.partition("CASES: ")[2].partition("}")[0]
    assert {line.split('"')[1] for line in theirs.splitlines() if '"' in line} == set(
        core_quire.CASES
    )


def test_every_block_of_the_cycle_evicts_a_content(
    core_quire: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = KVCacheManager(KVCacheConfig((GROUP,), 1024))
    monkeypatch.setattr(core_quire, "make_memory", lambda num_blocks: memory)
    core_quire.CASES["take_publish_release"](memory.config.num_blocks)
    # Four calls at least; the first found empty blocks.
    num_calls, rest = divmod(memory.num_evicted_blocks, memory.config.num_blocks)
    assert num_calls >= 3 and rest == 0
    assert len(memory.cache) == memory.config.num_blocks


def test_a_step_evicts_as_many_blocks_as_it_takes(core_quire: ModuleType) -> None:
    timing = sys.modules["benchmarks.core.timing"]
    scheduler = core_quire.make_decoding(100)
    memory = scheduler.memory
    num_before, num_held = memory.num_evicted_blocks, memory.pool.num_held
    core_quire.run_steps(scheduler, core_quire.BLOCK_SIZE)
    num_taken = memory.pool.num_held - num_held
    assert num_taken >= core_quire.NUM_SEQUENCES
    num_blank = timing.NUM_FILLERS  # at most, where the fillers did not come out even
    assert num_taken - num_blank < memory.num_evicted_blocks - num_before <= num_taken
