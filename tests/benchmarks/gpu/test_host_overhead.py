"""The host's share of a step: what is measured, and what is said of it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def script(load_script: LoadScript, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_script("benchmarks.gpu.host_overhead")
    monkeypatch.setattr(found, "NUM_OUTPUT_TOKENS", 24)
    return found


def test_all_rows_are_in_use_and_each_step_has_all_parts(script: ModuleType) -> None:
    engine = script.make_engine(4)
    steps = script.run(4, 40)
    assert len(steps) == 40 and not engine.has_work()
    assert all(set(step.parts_us) == set(script.PARTS) for step in steps)
    assert all(min(step.parts_us.values()) > 0 < step.host_us for step in steps)
    with_prompts = [step for step in steps if step.num_prefill_tokens]
    assert 4 <= len(with_prompts) <= 12, "each of 4 rows begins anew after 24 steps"
    assert {step.num_prefill_tokens for step in with_prompts} <= {161, 2 * 161}


def test_medians_and_what_they_hide_behind(script: ModuleType) -> None:
    parts = dict.fromkeys(script.PARTS, 10.0)
    steps = [script.Step(0, parts | {"apply": us}, 10 * us) for us in (1.0, 2.0, 90.0)]
    decode, mixed = script.summarize(64, [*steps, script.Step(161, parts, 400.0)])
    assert (decode.kind, decode.num_steps, mixed.kind) == ("decode", 3, "with prompts")
    assert decode.parts_us["apply"] == 2.0 and decode.host_us == 20.0
    assert decode.host_mean_us == pytest.approx(310) and decode.host_p99_us == 20.0
    floor_us = 1e6 * (2 * 8.03e9 + 64 * (161 + 12) * 131_072) / 4.2e12
    assert decode.hides_behind["8B"] == pytest.approx(floor_us / 20)
    lines = script.table([decode, mixed]).splitlines()
    assert lines[2].startswith("| 64 | decode | 10 | 10 |") and len(lines) == 4


def test_the_command_writes_all_figures(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script.gc, "freeze", lambda: None)
    out = tmp_path / "host.json"
    words = ["--rows", "1,2", "--steps", "30", "--out", str(out), "--profile", "3"]
    assert script.main(words) == 0
    shares = json.loads(out.read_text())["shares"]
    assert {(share["num_rows"], share["kind"]) for share in shares} == {
        (rows, kind) for rows in (1, 2) for kind in ("decode", "with prompts")
    }
    told = capsys.readouterr().out
    assert told.count("| decode |") == 2 and "due to restriction <3>" in told
