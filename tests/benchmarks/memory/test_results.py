"""The report says all figures, with the published ones beside them where there are any."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory.load import SHAPES
from benchmarks.memory.meter import PARTS, MemoryUse
from benchmarks.memory.results import (
    PUBLISHED_RUNNING,
    PUBLISHED_SAVED,
    MemoryResults,
    as_json,
    table,
    write_json,
)
from benchmarks.memory.sharing import BEAMS, PARALLEL, Saved
from benchmarks.memory.study import Carried

from quire.bench.baselines.contiguous import KV_ALLOCATORS
from quire.errors import ConfigurationError


def carried(mean_running: float, *, is_steady: bool = True) -> Carried:
    shares = dict.fromkeys(PARTS, 0.0) | {"useful": 0.75, "free": 0.25}
    use = MemoryUse(shares, 0.875, mean_running, 9, 123.4, 1.5, 60.0, is_steady)
    return Carried(use, 0.0625, 0.25, 99.0, 1000, 7, 70)


def results(shape: str | None = "sharegpt", rate: float | None = 2.0) -> MemoryResults:
    setting: dict[str, Any] = {
        "shape": shape,
        "mode": "simulated, on a virtual clock",
        "sharing_model": "the embedded model",
        "placement": "buddy",
        "load": {
            "num_prompts": 600,
            "input_mean": 161,
            "output_mean": 338,
            "requests_per_s": rate,
            "max_model_len": 2048,
        },
        "budget": {"num_slots": 15_700, "block_size": 16},
    }
    found = {name: carried(10.0 + index) for index, name in enumerate(KV_ALLOCATORS)}
    return MemoryResults(setting, found, [Saved(BEAMS, 2, 0.4321, 16, 99)])


def test_the_table_says_what_was_measured_and_what_was_published() -> None:
    lines = table(results()).splitlines()
    assert lines[0] == (
        "600 requests, prompts of 161 and outputs of 338 tokens on average, 2 requests/s;"
        " simulated, on a virtual clock"
    )
    assert lines[1].startswith("981 KV blocks of 16 (15700 slots), max_model_len 2048,")
    cells = {line[:30].strip(): line[30:].split() for line in lines if line[30:]}
    assert cells["requests running, mean"] == ["10.0", "11.0", "12.0", "13.0"]
    assert cells["published"] == ["7.0", "9.8", "13.6", "30.4"]
    assert cells["useful"] == ["75.0%"] * 4 and cells["internal"] == ["0.0%"] * 4
    assert cells["useful of what is held"] == ["87.5%"] * 4
    assert cells["duration s"] == ["99"] * 4 and cells["p99"] == ["0.250"] * 4
    assert cells["output tokens/s"] == ["123"] * 4 and cells["preemptions"] == ["7"] * 4
    assert lines[-1] == "  beams 2: 43.2% (44.3%), 16 requests"


def test_other_loads_are_compared_with_nothing() -> None:
    shown = table(results(shape=None, rate=None))
    assert "published  " not in shown and "all at t=0" in shown
    assert shown.endswith("beams 2: 43.2%, 16 requests")


def test_parts_that_were_left_out_have_no_lines() -> None:
    full = results()
    assert "saved" not in table(MemoryResults(full.setting, full.allocators, []))
    assert "useful" not in table(MemoryResults(full.setting, {}, full.sharing))


def test_an_average_over_the_whole_run_is_said_to_be_one() -> None:
    full = results()
    loose = MemoryResults(full.setting, {"paged": carried(3.0, is_steady=False)}, [])
    assert "paged: no request ever waited" in table(loose)
    assert "no request ever waited" not in table(full)


def test_the_json_has_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(results(), path)
    found = json.loads(path.read_text())
    assert found == as_json(results())
    assert found["budget"]["num_slots"] == 15_700
    paged = found["allocators"]["paged"]
    assert paged["use"]["mean_running"] == 13.0 and paged["published_mean_running"] == 30.4
    assert set(paged["use"]["shares"]) == set(PARTS)
    assert found["sharing"] == [
        {
            "kind": "beams",
            "width": 2,
            "share": 0.4321,
            "num_requests": 16,
            "num_steps": 99,
            "published_share": 0.443,
        }
    ]


def test_a_file_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be written"):
        write_json(results(), tmp_path)


def test_published_figures_are_of_known_things() -> None:
    assert set(PUBLISHED_RUNNING) <= set(SHAPES) and set(PUBLISHED_SAVED) == set(SHAPES)
    for running in PUBLISHED_RUNNING.values():
        assert set(running) == set(KV_ALLOCATORS)
    for saved in PUBLISHED_SAVED.values():
        assert {kind for kind, _ in saved} == {PARALLEL, BEAMS}
        assert all(0 < share < 1 - 1 / width for (_, width), share in saved.items())
