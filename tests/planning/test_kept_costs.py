"""What was measured is found again under the same facts, and only under these."""

from pathlib import Path

import pytest
from tests.planning.costs import known_step_costs

from quire.errors import ConfigurationError
from quire.planning.kept_costs import KeptCosts

FACTS = {"model": "abc", "block_size": 16, "quantization": None}


def test_an_entry_is_found_under_its_facts_only(tmp_path: Path) -> None:
    kept, costs = KeptCosts(tmp_path / "below" / "costs.json"), known_step_costs()
    assert kept.find(FACTS) is None
    kept.keep(FACTS, costs)
    kept.keep({**FACTS, "block_size": 32}, costs)
    found = KeptCosts(tmp_path / "below" / "costs.json").find(FACTS)
    assert found is not None and found.as_mapping() == costs.as_mapping()
    assert kept.find({**FACTS, "model": "abd"}) is None
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["costs.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0, "costs": {}}', '{"format": 4}'])
def test_unreadable_costs_are_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    kept = KeptCosts(path)
    assert kept.find(FACTS) is None
    kept.keep(FACTS, known_step_costs())
    assert kept.find(FACTS) is not None


def test_a_damaged_entry_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    KeptCosts(path).keep(FACTS, known_step_costs())
    path.write_text(path.read_text().replace('"bounds"', '"bound"'))
    assert KeptCosts(path).find(FACTS) is None


def test_a_place_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"can't be kept .* with --costs"):
        KeptCosts(tmp_path / "file" / "costs.json").keep(FACTS, known_step_costs())
