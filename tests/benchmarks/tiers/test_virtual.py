"""Short forms of the benchmarks in virtual time: what they promise holds in small as well."""

import json
from pathlib import Path

import pytest
from benchmarks.tiers import replay, rule, swap
from benchmarks.tiers.virtual import Ask, Disk, Machine, VirtualServer


def test_a_prompt_that_was_evicted_comes_back_from_the_disk() -> None:
    first, other = tuple(range(1, 801)), tuple(range(1001, 1801))
    asks = [Ask(0.0, first, 2), Ask(10.0, other, 2), Ask(20.0, first, 2)]
    server = VirtualServer(Machine(), 60, Disk(500e6))
    found = server.run(asks)
    assert found.num_loads == 1 and 784 <= found.disk_tokens <= 799
    computed_s, _, loaded_s = found.first_token_s
    assert loaded_s < computed_s / 10
    assert found.written_bytes >= 2 * 50 * 16 * Machine().token_bytes
    without = VirtualServer(Machine(), 60, None).run(asks)
    assert without.num_loads == without.disk_tokens == 0
    assert without.first_token_s[2] == pytest.approx(computed_s, rel=0.3)


def test_a_disk_keeps_what_it_has_room_for() -> None:
    asks = [Ask(10.0 * at, tuple(range(1000 * at + 1, 1000 * at + 801)), 2) for at in range(20)]
    again = [Ask(300.0 + ask.at_s, ask.prompt, 2) for ask in asks]
    found = {}
    for num_prompts in (5, 40):
        num_bytes = num_prompts * 800 * Machine().token_bytes
        found[num_prompts] = VirtualServer(Machine(), 60, Disk(1e9, num_bytes=num_bytes)).run(
            asks + again
        )
    assert found[40].num_loads == 20
    assert found[5].num_loads < 10


def test_the_rule_is_about_as_good_as_the_better_choice() -> None:
    for line in rule.table([5.0, 30.0, 1000.0], 25, noise=0.2)[2:]:
        assert float(line.split("|")[-2]) < 1.1, line


def test_swapping_serves_more_than_computing_again() -> None:
    options = ["--hours", "0.05", "--blocks", "600"]
    lines = swap.table(swap.parse(options))
    without, swapped = (line.split("|") for line in lines[2:])
    assert without[2].strip() == "none" and float(without[4]) == 1.0
    assert float(swapped[4]) > 1.1, lines


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000 * at, "input_length": 4000, "output_length": 64, "hash_ids": ids}
        for at, ids in enumerate([[*range(8)], [*range(10, 18)], [*range(8)], [*range(10, 18)]])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ["--trace", str(trace), "--pool", "0.6", "--disks", "none,500:100"]
    lines = replay.table(replay.parse(options))
    without, with_disk = (line.split("|") for line in lines[4:])
    assert float(without[4].strip().rstrip("%")) == 0.0
    assert float(with_disk[4].strip().rstrip("%")) > 40.0
