"""Plans of the embedded model: fits equal an engine's memory, and measured costs are stored."""

import json
import os
from pathlib import Path

import pytest
from tests.planning.costs import known_step_costs

from quire.assembly.build import build_engine
from quire.assembly.reports.memory_fit import choose_model, fit_memory
from quire.errors import ConfigurationError
from quire.numa.binding import _set_affinity
from quire.options.engine_options import EngineOptions
from quire.planning import measuring
from quire.planning.lines import plan_data, plan_lines
from quire.planning.load import read_load
from quire.planning.objectives import Objectives, parse_objectives
from quire.planning.plan import Planner
from quire.planning.step_cost_file import StepCostFile
from quire.planning.step_costs import StepCosts
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds
from quire.tiers.disk.load_rate import LoadSpeed

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "kv_cache_memory": "16MiB"}
LOAD = "prompt=40,output=8,rate=20,requests=20"


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> StepCostFile:
    """With what the small engine's steps take here."""
    costs = StepCostFile(tmp_path_factory.mktemp("costs") / "costs.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "LEAST_RUNS", 8)
        Planner(SMALL, costs).measure("own", "auto", 100, 0.01)
    return costs


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_seqs": 4, "kv_cache_memory": "8MiB"},
        {"max_num_seqs": 4, "num_blocks": 99, "block_size": 64, "quantization": "int8"},
        {"max_num_seqs": 2, "max_model_len": 500, "kv_cache_dtype": "int8"},
    ],
)
def test_memory_is_that_of_the_engine_s_ledger(given: dict[str, object]) -> None:
    options = EngineOptions.from_mapping({"skip_tokenizer_init": True, **given})
    fit = fit_memory(options, choose_model(options))
    engine = build_engine(options)
    assert fit.weight_bytes == engine.facts["weight_bytes"]
    assert fit.num_blocks == engine.facts["num_blocks"]
    assert fit.kv_bytes == engine.memory_report().total_bytes
    assert fit.max_model_len == engine.limits.max_model_len
    assert fit.num_sequences(fit.max_model_len) >= 1


def test_an_unmeasured_plan_says_not_measured_here(tmp_path: Path) -> None:
    plan = Planner({}, StepCostFile(tmp_path / "costs.json")).plan(read_load(LOAD), Objectives())
    assert (plan.found, plan.best) == ((), None)
    lines = list(plan_lines(plan, None))
    assert any(line.split()[:2] == ["int4", "auto"] for line in lines)
    assert lines[-1].startswith("what to expect: not measured here; `--measure`")
    data = plan_data(plan, 2.0)
    assert data["best"] is None
    assert data["memory"][0]["steps"] == "not measured here"


def test_a_plan_uses_stored_costs(cost_file: StepCostFile) -> None:
    planner = Planner(SMALL, cost_file)
    plan = planner.plan(read_load(LOAD), parse_objectives("ttft=60s,itl=60s"))
    assert [each.candidate.shape.max_itl_ratio for each in plan.found] == [2.7, 0.0]
    assert plan.best is not None and plan.best.candidate.shape.max_num_seqs == 8
    text = "\n".join(plan_lines(plan, 3.6))
    (best,) = [line for line in text.splitlines() if line.startswith("best: quire serve ")]
    for words in ("--block-size 16", "--max-num-seqs 8", "--max-itl-ratio "):
        assert words in best
    for given in ("--kv-cache-memory 16MiB", "--max-num-batched-tokens 128"):
        assert given in best
    assert "why:  step time at saturation: " in text
    assert "a million tokens" in text
    data = json.loads(json.dumps(plan_data(plan, 3.6)))
    assert data["keeps_objectives"]
    assert data["best"]["ttft_p50_s"] > 0
    tokens_per_s = data["best"]["output_tokens_per_s"]
    assert data["best"]["cost_per_million_tokens"] == pytest.approx(1e3 / tokens_per_s)


def test_objectives_that_no_plan_meets_are_named(cost_file: StepCostFile) -> None:
    plan = Planner(SMALL, cost_file).plan(read_load(LOAD), parse_objectives("ttft=0.000001"))
    text = "\n".join(plan_lines(plan, None))
    assert "no configuration that was measured keeps the objectives" in text
    assert not plan_data(plan, None)["keeps_objectives"]


def test_sequences_longer_than_measured_ones_are_not_predicted(cost_file: StepCostFile) -> None:
    planner = Planner({**SMALL, "max_num_batched_tokens": 4000}, cost_file)
    plan = planner.plan(read_load("prompt=3000,output=8,at_once,requests=3"), Objectives())
    assert plan.best is None
    assert "not measured here: 4,000 tokens in a step" in "\n".join(plan_lines(plan, None))


def test_the_engine_is_left_as_it_was(cost_file: StepCostFile) -> None:
    accuracy = Planner(SMALL, cost_file).precisions()[0].costs
    assert accuracy is not None
    assert accuracy.bounds.num_rows >= 8
    assert accuracy.bounds.num_tokens >= 128
    assert accuracy.bounds.context >= 100


def test_options_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    cost_file = StepCostFile(tmp_path / "costs.json")
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is 2, but plans are made"):
        Planner({"tensor_parallel_size": 2}, cost_file)
    with pytest.raises(ConfigurationError, match="cache_dir is '/kept', but block sizes are"):
        Planner({"cache_dir": "/kept", "block_size": "auto"}, cost_file).tune(read_load(LOAD))
    with pytest.raises(ConfigurationError, match="host_cache_size is 8589934592, but plans and"):
        Planner({"host_cache_size": "8GiB"}, cost_file)
    with pytest.raises(ConfigurationError, match="quantization is 'int3', but must be"):
        Planner({}, cost_file).measure("int3", "auto", 100, 0.01)
    with pytest.raises(ConfigurationError, match="max_model_len is 50, but steps are measured"):
        Planner({"max_model_len": 50}, cost_file).measure("own", "auto", 100, 0.01)


def test_measured_costs_are_found_by_the_facts_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the measured engine keeps its thread to a part of the machine."""
    allowed = os.sched_getaffinity(0)

    def measure(*_: object) -> StepCosts:
        _set_affinity({min(allowed)})
        return known_step_costs()

    monkeypatch.setattr("quire.planning.plan.measure_costs", measure)
    cost_file = StepCostFile(tmp_path / "costs.json")
    given = {**SMALL, "quantization": "int8"}
    planner = Planner(given, cost_file)
    planner.measure("own", "auto", 100, 0.01)
    assert os.sched_getaffinity(0) == allowed
    assert planner.as_given().costs is not None
    assert Planner({**given, "max_num_seqs": 2}, cost_file).as_given().costs is not None
    for other in (
        {"quantization": None},
        {"async_scheduling": True},
        {"hf_overrides": {"rope_theta": 1e4}},
        {"batch_invariant": True},
        {"numa": "off"},
    ):
        assert Planner({**given, **other}, cost_file).as_given().costs is None, other


def test_short_models_are_measured_up_to_their_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LEAST_RUNS", 8)
    planner = Planner({**SMALL, "max_model_len": 100}, StepCostFile(tmp_path / "costs.json"))
    assert planner.measure("own", "auto", 2000, 0.01).bounds.context <= 100


def test_a_disk_tier_is_measured_with_the_steps_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with a disk tier needs the speeds of its folder, and keeps the tier's sizes."""
    speeds = DiskSpeeds(LoadSpeed(1e-3, 1e-9), LoadSpeed(1e-2, 4e-9), 1e-8)
    asked: list[tuple[Path, int]] = []

    def measure(folder: Path, block_bytes: int) -> DiskSpeeds:
        asked.append((folder, block_bytes))
        return speeds

    monkeypatch.setattr("quire.planning.plan.measure_costs", lambda *_: known_step_costs())
    monkeypatch.setattr("quire.planning.plan.measure_disk", measure)
    cost_file = StepCostFile(tmp_path / "costs.json")
    Planner({**SMALL, "quantization": "int8"}, cost_file).measure("own", "auto", 100, 0.01)
    given = {"quantization": "int8", "cache_dir": str(tmp_path / "kept"), "cache_size": "64MiB"}
    planner = Planner({**SMALL, **given}, cost_file)
    assert planner.as_given().costs is None, "the disk was not measured"
    assert asked == []
    planner.measure("own", "auto", 100, 0.01)
    found = planner.as_given()
    assert found.fit is not None and found.costs is not None
    assert asked == [(tmp_path / "kept", found.fit.groups[0].stored_bytes)]
    shape = DiskShape(speeds=speeds, num_bytes=64 << 20, bytes_a_day=640 << 20)
    assert found.shape.disk == shape
    plan = Planner({**SMALL, **given}, cost_file).plan(read_load(LOAD), Objectives())
    assert "the disk tier begins empty" in "\n".join(plan_lines(plan, None))
    assert plan_data(plan, None)["expected"][0]["loaded_tokens"] == 0


def test_a_damaged_disk_speed_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    speeds = DiskSpeeds(LoadSpeed(0.0, 1.0), LoadSpeed(0.0, 1.0), 1.0)
    StepCostFile(path).store_disk({"cache_dir": "/kept"}, speeds)
    assert StepCostFile(path).find_disk({"cache_dir": "/kept"}) is not None
    path.write_text(path.read_text().replace("1.0", "null"))
    assert StepCostFile(path).find_disk({"cache_dir": "/kept"}) is None
