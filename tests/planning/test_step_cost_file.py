"""Stored step costs are found under the facts that they were stored with, and no others."""

from pathlib import Path

import pytest
from tests.planning.costs import known_step_costs

from quire.errors import ConfigurationError
from quire.planning.step_cost_file import StepCostFile

FACTS = {"model": "abc", "block_size": 16, "quantization": None}


def test_an_entry_is_found_under_its_facts_only(tmp_path: Path) -> None:
    cost_file, costs = StepCostFile(tmp_path / "below" / "costs.json"), known_step_costs()
    assert cost_file.find(FACTS) is None
    cost_file.store(FACTS, costs)
    cost_file.store({**FACTS, "block_size": 32}, costs)
    found = StepCostFile(tmp_path / "below" / "costs.json").find(FACTS)
    assert found is not None and found.as_mapping() == costs.as_mapping()
    assert cost_file.find({**FACTS, "model": "abd"}) is None
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["costs.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0, "costs": {}}', '{"format": 4}'])
def test_unreadable_costs_are_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    cost_file = StepCostFile(path)
    assert cost_file.find(FACTS) is None
    cost_file.store(FACTS, known_step_costs())
    assert cost_file.find(FACTS) is not None


def test_a_damaged_entry_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    StepCostFile(path).store(FACTS, known_step_costs())
    path.write_text(path.read_text().replace('"bounds"', '"bound"'))
    assert StepCostFile(path).find(FACTS) is None


def test_a_place_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"can't be kept .* with --costs"):
        StepCostFile(tmp_path / "file" / "costs.json").store(FACTS, known_step_costs())
