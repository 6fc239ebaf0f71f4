"""The table and the JSON, from invented figures."""

import json
from pathlib import Path

import pytest

from quire.bench.compare import Ratio, Round, WidthChoice
from quire.bench.contenders import MEMORY_FIGURES
from quire.bench.machine import Noise
from quire.bench.metrics import Timeline, figures
from quire.bench.report import Results, as_json, table, write_json
from quire.bench.trace_summary import StepTimes
from quire.errors import ConfigurationError

TIMELINE = Timeline(7, 0.0, [0.5, 0.6], [1, 2])
SETTING = {"model_id": "some/model", "dtype": "float32", "num_threads": 2, "processor": "a chip"}
COST = StepTimes(9, 4.0, 1000.0, 40.0, 10.0, 11.0, 12.0, {"schedule": 0.1, "forward": 0.9})


def _round(duration_s: float, noise: Noise, memory: float | None) -> Round:
    found = figures([TIMELINE], duration_s) | dict.fromkeys(MEMORY_FIGURES, memory)
    return Round(found, noise)


def _results(noise: Noise) -> Results:
    return Results(
        setting=SETTING,
        rounds={
            "quire": [_round(duration_s, noise, 0.25) for duration_s in (1.0, 0.5, 2.0)],
            "hf": [_round(4.0, noise, None)] * 3,
        },
        widths={"hf": WidthChoice(16, 48, {16: 0.25, 48: None})},
        ratios={"hf": Ratio(4.0, 2.0, 8.0)},
        trace={"all steps": COST},
    )


def test_the_table_shows_medians_side_by_side() -> None:
    lines = table(_results(Noise(0.01, 0.0))).splitlines()
    assert lines[2] == "hf: output tokens/s of the first 48 requests: x16 0, x48 does not fit"
    assert lines[4].split() == ["quire", "hf", "x16"]
    cells = {line[:24].strip(): line[24:].split() for line in lines}
    assert lines[0] == "some/model, float32, 2 threads, a chip"
    assert "1 requests, 7 prompt tokens, 2 output tokens" in lines[1]
    assert cells["output tokens/s"] == ["2", "0"]  # 2 tokens in 1 s (the median) and in 4 s
    assert cells["duration s"] == ["1.00", "4.00"]
    assert cells["TTFT ms, mean"] == ["500.0", "500.0"]
    assert cells["TPOT ms, p99"] == ["100.0", "100.0"]
    assert cells["KV use, peak"] == ["25.0%", "-"]
    assert cells["useful of held KV"] == ["25.0%", "-"]
    assert "quire makes 4.00 times the output tokens/s of hf x16 (rounds 2.00 to 8.00)" in lines


@pytest.mark.parametrize("num_drafts", [0, 40])
def test_the_table_tells_of_drafts_if_there_were_any(num_drafts: int) -> None:
    results = _results(Noise(0.01, 0.0))
    for result in results.rounds["quire"]:
        result.figures["num_drafts"] = num_drafts
        result.figures["num_accepted_drafts"] = 30 if num_drafts else 0
        result.figures["draft_tokens_a_step"] = 4.0 if num_drafts else None
    found = [line for line in table(results).splitlines() if "drafts" in line]
    expected = "quire's drafts: 40 verified, 30 accepted (75.0%), 4.00 tokens a step of a sequence"
    assert found == ([f"{expected} with drafts"] if num_drafts else [])


def test_the_table_shows_quires_ledger() -> None:
    lines = table(_results(Noise(0.01, 0.0))).splitlines()
    place = lines.index("quire's KV memory, mean over the run")
    assert [line.split()[0] for line in lines[place + 1 : place + 10]] == [
        *("useful", "unfilled", "unused", "reserved", "in", "moving", "cached", "free", "total")
    ]
    baselines_alone = dict.fromkeys(MEMORY_FIGURES)
    results = _results(Noise(0.01, 0.0))
    for run in results.rounds["quire"]:
        run.figures.update(baselines_alone)
    assert "KV memory, mean" not in table(results)


def test_the_table_tells_the_cost_of_steps() -> None:
    shown = table(_results(Noise(0.01, 0.0)))
    assert "all steps: 9 of 1000, 40 a step, 10.00 per sequence and step" in shown
    assert "schedule 10.0%, forward 90.0%" in shown


@pytest.mark.parametrize(
    ("noise", "text"),
    [
        (Noise(0.5, 0.0), "WARNING: in 6 of 6 runs others took more than 0.15 cores"),
        (Noise(0.0, 0.5), "WARNING"),
        (Noise(0.1, 0.0), "other processes took up to 0.10 cores meanwhile"),
        (Noise(None, None), "not known on this system"),
    ],
)
def test_the_table_tells_who_else_was_busy(noise: Noise, text: str) -> None:
    shown = table(_results(noise))
    assert text in shown
    assert ("WARNING" in shown) == noise.is_loud


def test_json_has_our_medians_at_the_top_and_every_round_below() -> None:
    found = as_json(_results(Noise(0.25, 0.0)))
    assert found["duration"] == 1.0 and found["model_id"] == "some/model"
    assert [run["duration"] for run in found["rounds"]["quire"]] == [1.0, 0.5, 2.0]
    assert found["rounds"]["hf"][0]["other_cores"] == 0.25
    assert found["baselines"]["hf"]["width"] == 16
    assert found["baselines"]["hf"]["quire_times_faster"]["of_medians"] == 4.0
    assert found["baselines"]["hf"]["peak_kv_use"] is None
    assert found["trace"]["all steps"]["per_sequence_us"] == 10.0


def test_json_is_written_whole_or_refused(tmp_path: Path) -> None:
    results = _results(Noise(0.0, 0.0))
    write_json(results, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["rounds"] == as_json(results)["rounds"]
    with pytest.raises(ConfigurationError, match="can't be written"):
        write_json(results, tmp_path)
