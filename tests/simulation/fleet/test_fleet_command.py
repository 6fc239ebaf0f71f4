"""The command line of fleets."""

from pathlib import Path

import pytest

from quire.simulation.__main__ import main

LINES = """{"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [0, 1, 2]}
{"timestamp": 900, "input_length": 1700, "output_length": 4, "hash_ids": [0, 1, 3, 4]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    return str(path)


def test_it_prints_a_line_for_each_policy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--replicas", "2", "--policy", "expected_ttft", "--policy", "sglang:cache_threshold=0"]
    assert main(["fleet", trace, *words]) == 0
    first, blank, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("2 requests in 1 s to 2 replicas of 4000 blocks;") and not blank
    assert [line.split("|")[1].strip() for line in table[2:]] == [
        "expected_ttft",
        "sglang:cache_threshold=0",
    ]
    assert len({line.count("|") for line in table}) == 1
    assert " 35.31% " in table[2]  # 1,024 of 2,900 tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "fastest"], "routing policy is 'fastest'"),
        (["--policy", "sglang:threshold"], "must be NAME or NAME:OPTION=NUMBER"),
        (["--prefill-rate", "0"], "prefill_rate is 0"),
        (["--step-s", "0.2"], "a step of 2048 tokens at that rate takes 0.1 s"),
        (["--eviction", "fifo"], "eviction order is 'fifo'"),
        (["--speed", "0"], "speed is 0"),
    ],
)
def test_invalid_fleet_options_are_refused(
    trace: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", trace, *words]) == 2
    assert message in capsys.readouterr().err
