"""Tokens and log-probabilities behind a host tier, and a disk behind that: the same to the bit.

On the CPU, where the copies are plain ones; all else is what serves a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_hybrid_law import (
    Found,
    alone,
    folder,
    make_crowd,
    make_llm,
    results,
)
from tests.engine.tier_law import eager

from quire.assembly import build
from quire.engine.engine import sleep, wake_up
from quire.offline.llm import LLM

__all__ = ["alone", "folder"]

pytestmark = pytest.mark.parametrize("folder", ["windows", "all kinds"], indirect=True)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "check_host_tier", lambda options: None)
    with eager():
        yield


def tiny_llm(folder: Path, **options: Any) -> LLM:
    """Hardly more blocks than the longest sequence needs, so that much is preempted."""
    growth = make_llm(folder, num_blocks=4096).engine.scheduler.memory.growth
    num_blocks = growth.most_to_hold(192) * 5 // 4
    return make_llm(folder, max_num_seqs=20, num_blocks=num_blocks, **options)


def finish(llm: LLM) -> dict[str, dict[str, float]]:
    """What its tiers count, at the end."""
    moves = llm.engine.scheduler.memory.moves
    assert moves is not None
    assert llm.engine.tier_work.wait_for_moves(60.0)
    assert llm.engine.stats().num_held_blocks == 0
    assert moves.loads.stats.num_loaded_tokens > 0
    llm.engine.tier_work.close()
    return dict(moves.tiers.counts())


def test_blocks_swapped_to_the_host_come_back_unchanged(folder: Path, alone: Found) -> None:
    llm = tiny_llm(folder, host_cache_size="8MiB")
    prompts, params = make_crowd()
    for _ in range(2):
        assert results(llm.generate(prompts, params, use_tqdm=False)) == alone
    sleep(llm.engine)
    wake_up(llm.engine)
    assert results(llm.generate(prompts, params, use_tqdm=False)) == alone
    report = llm.memory_report()
    host = report.tiers["by_tier"]["host"]
    assert host["pinned_bytes"] <= 8 << 20 and host["used_bytes"] > 0
    assert "stored in tier host: " in str(report)
    assert finish(llm)["host"]["loads_done"] > 0


def test_blocks_on_disk_behind_the_host_outlive_the_process(
    folder: Path, alone: Found, tmp_path: Path
) -> None:
    prompts, params = make_crowd()
    loaded = []
    for size in ("8MiB", "8MiB", "1MiB"):
        llm = tiny_llm(folder, host_cache_size=size, cache_dir=str(tmp_path / "cache"))
        assert results(llm.generate(prompts, params, use_tqdm=False)) == alone
        counts = finish(llm)
        loaded.append(counts["disk"]["loads_done"])
        assert counts["host"]["num_behind"] == 0
    assert loaded[0] == 0 or loaded[1] > loaded[0]
    assert loaded[1] > 0 and loaded[2] > 0
