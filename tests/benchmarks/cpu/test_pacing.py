"""The pacing benchmark runs on the engine as it is, and its figures are what they are called."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from quire.bench.workload import LengthSpec, WorkloadSpec


@pytest.fixture
def pacing(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.cpu.pacing")


def test_a_percentile_is_the_nearest_rank(pacing: ModuleType) -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [pacing.percentile(values, percent) for percent in (50, 99, 100)] == [100, 198, 200]
    assert pacing.percentile([7.0], 99) == 7


def test_both_budgets_get_the_same_arrivals(pacing: ModuleType) -> None:
    """Round by round, in order of arrival; at once where the rate is infinite."""
    lengths = WorkloadSpec(num_prompts=50, input=LengthSpec(20, 4, 60))
    load = pacing.Load(requests=lengths)
    first, second = (pacing.make_prompts(load, 1000, 1, 5.0) for _ in range(2))
    assert first == second != pacing.make_prompts(load, 1000, 2, 5.0)
    times = [at_s for at_s, _, _ in first]
    assert times == sorted(times)
    assert 5 < times[-1] < 20  # 50 arrivals, 5 a second
    assert {at_s for at_s, _, _ in pacing.make_prompts(load, 1000, 0, float("inf"))} == {0.0}


def test_itl_is_told_in_idle_medians_and_budgets_are_kept_apart(pacing: ModuleType) -> None:
    rounds = [
        pacing.Round(pacing.CONSTANT, [0.01, 0.08], [0.1]),
        pacing.Round(pacing.PACED, [0.01, 0.02], [0.2]),
        pacing.Round(pacing.PACED, [0.03], [0.3]),
    ]
    found = pacing.Found(5.0, 0.01, 0.02, 9, rounds)
    figures = pacing.summarize(found)
    assert figures[pacing.CONSTANT]["itl_p99_idle"] == pytest.approx(8)
    assert figures[pacing.PACED]["itl_p99_idle"] == pytest.approx(3)
    assert figures[pacing.PACED]["itl_p99_crowd"] == pytest.approx(1.5)
    assert figures[pacing.PACED]["ttft_mean_ms"] == pytest.approx(250)
    table = pacing.report(found, pacing.Load())
    assert "paced ITL p99 is 1.50 times the idle median of 9 streams: below 3" in table


def test_the_whole_run(
    pacing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["--streams=2", "--num-prompts=4", "--input-mean=30", "--output-mean=3", "--rounds=1"]
    words += ["--max-num-seqs=8", "--idle=0.1", f"--out={out}"]
    assert pacing.main(words) == 0
    found = json.loads(out.read_text())
    assert [one["budget"] for one in found["rounds"]] == ["constant", "paced"]
    assert all(len(one["ttft_s"]) == 4 and one["itl_s"] for one in found["rounds"])
    assert found["num_crowd"] >= 2
    assert "itl_p99_crowd" in capsys.readouterr().out
