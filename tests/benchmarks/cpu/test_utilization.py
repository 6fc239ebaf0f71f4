"""The benchmark of utilization runs on the engine as it is, and its shares are of all time."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.bench.test_trace_summary import DECODE

from quire.hub.model_folder import EMBEDDED_MODEL


@pytest.fixture
def utilization(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.cpu.utilization")


def test_shares_add_up_to_the_time_between_results(utilization: ModuleType) -> None:
    record = DECODE.__class__(
        **{name: getattr(DECODE, name) for name in DECODE.__slots__}
        | {"busy_s": 0.9e-3, "gap_s": 0.1e-3, "schedule_s": 10e-6, "build_s": 20e-6}
    )
    found = utilization.shares([record] * 3)
    assert found["busy"] == pytest.approx(0.9) and found["step_ms"] == pytest.approx(1)
    parts = ("busy", "schedule", "build", "apply", "between")
    assert sum(found[part] for part in parts) == pytest.approx(1)
    assert found["between"] == pytest.approx(0.06)


@pytest.mark.parametrize("words", [(), ("--cost",)])
def test_a_short_run(utilization: ModuleType, tmp_path: Path, words: tuple[str, ...]) -> None:
    out = tmp_path / "found.json"
    given = ["--seconds=0.2", "--rows=4", "--loads=decode", f"--out={out}", *words]
    utilization.main([f"--models={EMBEDDED_MODEL}", *given])
    (found,) = json.loads(out.read_text())
    assert found["load"] == "decode"
    if words:
        assert found["accounts_us"] > 0
    else:
        assert 0 < found["busy"] < 1 and found["floor"] > 0
