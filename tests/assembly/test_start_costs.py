"""Costs that an engine measures at its start and remembers for later starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.assembly import build
from quire.assembly.build import build_engine
from quire.assembly.start_costs import StartCostFile, StartCosts
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, typical_model
from quire.core.scheduling.pacing import StepPacer
from quire.engine.step_work import MachineRates

FACTS = {"kernels": "avx2"}
COSTS = StartCosts(typical_model(StepLoad(1, 1), 0.01), MachineRates(1e10, 1e12))


@pytest.mark.parametrize("rates", [COSTS.rates, None])
def test_costs_are_found_again(tmp_path: Path, rates: MachineRates | None) -> None:
    path = str(tmp_path / "below" / "costs.json")
    file = StartCostFile(path, FACTS)
    assert file.find() is None
    file.store(COSTS._replace(rates=rates))
    found = StartCostFile(path, FACTS).find()
    assert found is not None and found.rates == rates
    assert found.model.coefficients == COSTS.model.coefficients
    assert StartCostFile(path, {"kernels": "torch"}).find() is None


@pytest.mark.parametrize("coefficients", [[1.0], ["x"], [-1.0] * 18, [10**400], None])
def test_a_damaged_entry_is_left_out(
    tmp_path: Path, coefficients: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    file = StartCostFile(str(path), FACTS)
    file.store(COSTS)
    stored = json.loads(path.read_text())
    (entry,) = stored["start costs"].values()
    entry["coefficients"] = coefficients
    path.write_text(json.dumps(stored))
    assert file.find() is None
    assert "is damaged" in caplog.text


def test_a_file_that_can_t_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    StartCostFile(str(tmp_path / "file" / "costs.json"), FACTS).store(COSTS)
    assert "--start-costs" in caplog.text


def test_without_a_home_folder_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_home(path: str) -> str:
        return path

    monkeypatch.setattr("os.path.expanduser", find_no_home)
    file = StartCostFile("~/costs.json", FACTS)
    file.store(COSTS)
    assert file.find() is None and not Path("~").exists()


def test_an_engine_measures_again_if_options_or_times_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[StepCostModel] = []

    def measure(*arguments: Any, **options: Any) -> StepCostModel:
        measured.append(typical_model(StepLoad(1, 1), 0.001 * (len(measured) + 1)))
        return measured[-1]

    monkeypatch.setattr(build, "calibrated_model", measure)
    monkeypatch.setattr(build, "measure_rates", lambda *_: COSTS.rates)

    def start(holds: bool, **options: Any) -> tuple[float, ...]:
        monkeypatch.setattr(build, "still_holds", lambda *_: holds)
        path = str(tmp_path / "costs.json")
        engine = build_engine(
            {"num_blocks": 100, "max_itl_ratio": 2.5, "start_costs": path, **options}
        )
        assert engine.utilization.rates == COSTS.rates
        assert isinstance(engine.scheduler.pacer, StepPacer)
        coefficients: tuple[float, ...] = engine.facts["step_costs"]
        return coefficients

    first = start(False)
    assert start(True) == first and len(measured) == 1
    assert start(False) == measured[1].coefficients  # the times have changed
    assert start(True) == measured[1].coefficients and len(measured) == 2
    assert start(True, max_num_seqs=8) == measured[2].coefficients
    assert start(True, start_costs=None) == measured[3].coefficients
