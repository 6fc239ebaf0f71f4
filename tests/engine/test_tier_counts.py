"""What an engine tells of the tiers behind its memory, from files that are really there."""

import dataclasses
from pathlib import Path

import msgspec
from tests.server.telemetry.tier_counts import no_moves

from quire import LLM, SamplingParams
from quire.core.sequence import MissReason

PROMPT = "def f(a, b):\n" + "    a = a + b\n" * 12


def test_prefixes_found_after_a_restart_count_as_loaded(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        llm = LLM(cache_dir=str(tmp_path), cache_size="64MiB", kv_cache_memory="4MiB")
        llm.engine.scheduler.memory.moves.loads.compute_time.predict_s = lambda *_: 1e9
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.prefix_miss is not None
        assert llm.engine.tier_work.drain()
        stats, report = llm.engine.stats(), llm.memory_report()
        found.append((stats, report, output, {each.name: each for each in llm.get_metrics()}))
        llm.engine.tier_work.close()
        del llm
    (cold, _, _, _), (warm, report, output, metrics) = found
    assert cold.num_hit_tokens == cold.tiers["num_hit_tokens"] == cold.tiers["num_loads"] == 0
    assert cold.tiers["num_stored_blocks"] == cold.tiers["by_tier"]["disk"]["num_records"] > 2
    assert warm.num_hit_tokens == warm.tiers["num_hit_tokens"] == output.num_cached_tokens > 32
    assert warm.tiers["num_loads"] == 1 and warm.tiers["num_failed_blocks"] == 0
    assert warm.tiers["num_loaded_blocks"] == warm.tiers["by_tier"]["disk"]["loads_done"] > 2
    assert warm.tiers.keys() == no_moves().keys()
    assert warm.tiers["by_tier"]["disk"].keys() == no_moves()["by_tier"]["disk"].keys()
    assert report.tiers == report.as_dict()["tiers"] == warm.tiers
    assert "stored in tier disk: " in str(report)
    assert metrics["quire_prefix_loaded_tokens_total"].value == warm.num_hit_tokens
    assert metrics["quire_tier_bytes"].labels == {"tier": "disk"}
    told = dataclasses.asdict(warm)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == told


def test_a_prefix_not_worth_a_load_counts_as_not_loaded(tmp_path: Path) -> None:
    for is_slow in (False, True):
        llm = LLM(cache_dir=str(tmp_path), cache_size="64MiB", kv_cache_memory="4MiB")
        if is_slow:
            llm.engine.scheduler.memory.moves.loads.compute_time.predict_s = lambda *_: 0.0
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.engine.tier_work.drain()
        llm.engine.tier_work.close()
    assert output.prefix_miss is not None
    assert output.prefix_miss.reason == MissReason.NOT_LOADED
    stats = llm.engine.stats()
    assert stats.prefix_misses == {"not_loaded": 1} and stats.tiers["num_declined"] == 1
