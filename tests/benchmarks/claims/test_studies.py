"""The studies' parts that can be known without a clock."""

import json
from itertools import pairwise

import pytest
import torch
from benchmarks.claims.batch_sizes import LoadTrace, Served
from benchmarks.claims.contexts import QUICK, decode, random_model, read_plainly
from benchmarks.claims.contexts import _engine as make_engine
from benchmarks.claims.contexts import _scatter as scatter
from benchmarks.claims.operations import (
    ALL_PAGES,
    BLOCK_SIZE,
    FIRST_FIT,
    MANAGERS,
    NUM_LIVE_RUNS,
    PAGES,
    RUN_BLOCKS,
    Churn,
    make_memory,
    make_sequence,
)
from safetensors.torch import load_file

from quire.core.memory.kv_cache_manager import KVCacheManager

NUM_BLOCKS = 1024


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("level", [0.0, 0.5, 0.99])
def test_a_churn_keeps_its_level(manager: str, level: float) -> None:
    """As many blocks are held after operations as before, and sequences have whole runs."""
    churn = Churn(manager, level, NUM_BLOCKS)
    memory = churn._memory
    num_runs = NUM_BLOCKS // 2 // RUN_BLOCKS - 1 if manager == ALL_PAGES else NUM_LIVE_RUNS
    assert memory.pool.num_held == NUM_BLOCKS // 2 + num_runs * RUN_BLOCKS
    churn.operate(2 * num_runs + 1)
    assert memory.pool.num_held == NUM_BLOCKS // 2 + num_runs * RUN_BLOCKS
    for run in churn._runs:
        table = run.block_tables[0]
        assert len(set(table)) == RUN_BLOCKS
        if manager not in (PAGES, ALL_PAGES):
            assert all(right == left + 1 for left, right in pairwise(table))


def test_at_a_high_level_pages_lie_anywhere_and_first_fit_leaves_the_holes() -> None:
    paged, contiguous = (Churn(name, 0.9, NUM_BLOCKS) for name in (PAGES, FIRST_FIT))
    table = paged._runs[-1].block_tables[0]
    assert any(abs(right - left) > 1 for left, right in pairwise(table))
    in_use = {block for run in contiguous._runs for block in run.block_tables[0]}
    free = set(contiguous._memory.pool.free_ids())
    assert sum(block < min(in_use) for block in free) >= 300  # stepped over, one by one


@pytest.mark.parametrize("manager", [PAGES, FIRST_FIT])
def test_a_sequence_takes_the_blocks_of_all_its_tokens(manager: str) -> None:
    memory: KVCacheManager = make_memory(manager, NUM_BLOCKS)
    sequence = make_sequence(RUN_BLOCKS * BLOCK_SIZE)
    memory.admit(sequence, memory.match(sequence), 0)
    assert len(sequence.block_tables[0]) == RUN_BLOCKS
    memory.free(sequence)
    assert memory.pool.num_free == NUM_BLOCKS


def test_the_mean_batch_is_weighted_with_time() -> None:
    served = Served([(0.0, 0), (1.0, 4), (3.0, 10), (4.0, 0)], [])
    assert served.mean_size(0, 4) == pytest.approx((0 + 2 * 4 + 10) / 4)
    assert served.mean_size(2, 3.5) == pytest.approx((4 + 0.5 * 10) / 1.5)


def test_arrivals_follow_the_trace() -> None:
    arrivals_s = LoadTrace((1.0, 50.0, 1.0), 10.0).arrivals_s()
    assert arrivals_s == sorted(arrivals_s) and arrivals_s[0] >= 0 and arrivals_s[-1] < 30
    middle = sum(10 <= at_s < 20 for at_s in arrivals_s)
    assert middle > 10 * (len(arrivals_s) - middle)


def test_the_model_decodes_the_same_over_scattered_and_adjacent_pages() -> None:
    prompt = list(range(3, 3 + QUICK.contexts[0]))
    with random_model(QUICK) as (folder, weight_bytes):
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        assert weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert tensors["model.norm.weight"].shape == (config["hidden_size"],)
        pages, beside = (make_engine(QUICK, folder, is_paged=paged) for paged in (True, False))
        scatter(pages)
        paged, reserved = decode(pages, prompt, 4), decode(beside, prompt, 4)
    assert not folder.exists()
    assert len(paged.gaps_s) == len(reserved.gaps_s) == 3
    assert paged.held_bytes < reserved.held_bytes


def test_a_plain_read_leaves_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    assert len(read_plainly(torch.ones(1000), 3)) == 3
    assert torch.get_num_threads() == before
