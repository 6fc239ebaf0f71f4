"""The benchmark of a GPU: a miniature of all of it on the CPU, and how failures are reported."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

LoadScript = Callable[[str], ModuleType]
KERNELS = Path(__file__).parents[3] / "src/quire/kernels/triton"


@pytest.fixture
def gpu(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.gpu.sections")


@pytest.mark.long
def test_a_miniature_of_every_section_runs_and_all_checks_hold(
    gpu: ModuleType, tmp_path: Path
) -> None:
    out, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    folder = tmp_path / "models"
    arguments = ["--small", "--out", out, "--markdown", table, "--folder", folder]
    assert gpu.main([str(argument) for argument in arguments]) == 0
    results = json.loads(out.read_text())
    assert [one["section"] for one in results["sections"]] == list(gpu.SECTIONS)
    assert {one["status"] for one in results["sections"]} == {"done"}
    assert {row["section"] for row in results["rows"]} == set(gpu.SECTIONS)
    assert all(row["ok"] is not False for row in results["rows"])
    assert sum(row["ok"] is True for row in results["rows"]) >= 15
    text = table.read_text()
    assert all(f"| {row['name']} |" in text for row in results["rows"])
    assert not folder.exists()


def test_every_kernel_file_is_checked(load_script: LoadScript) -> None:
    kernels = {
        path.stem
        for path in KERNELS.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)
    }
    covered = [
        name for names in load_script("benchmarks.gpu.kernels").COVERS.values() for name in names
    ]
    assert sorted(covered) == sorted(kernels)


@pytest.fixture
def two_sections(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails in its first function, and one that adds a row."""

    def bad(bench: object) -> None:
        raise RuntimeError("no such kernel")

    parts = SimpleNamespace(bad=bad, good=lambda bench: bench.check("fine", True))
    monkeypatch.setitem(sys.modules, "made_up", parts)
    monkeypatch.setattr(
        gpu,
        "SECTIONS",
        {
            "first": gpu.Section(("made_up:bad", "made_up:good"), 60),
            "second": gpu.Section(("made_up:good",), 60),
        },
    )


def run(gpu: ModuleType, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, object], str]:
    out, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    code = gpu.main(["--out", str(out), "--markdown", str(table), *arguments])
    return code, json.loads(out.read_text()), table.read_text()


def test_a_failure_leaves_the_rest_and_is_reported(
    gpu: ModuleType, two_sections: None, tmp_path: Path
) -> None:
    code, results, text = run(gpu, tmp_path, "--small")
    assert code == 1 and results["ok"] is False
    first, second = results["sections"]  # type: ignore[misc]
    assert (first["status"], second["status"]) == ("failed", "done")
    assert first["error"] == "bad: RuntimeError: no such kernel"
    assert [row["section"] for row in results["rows"]] == ["first", "second"]  # type: ignore[attr-defined]
    assert "- **first failed**: bad: RuntimeError: no such kernel" in text
    assert text.count("| fine |") == 2


def test_a_section_that_dies_or_hangs_or_has_no_time_is_reported(
    gpu: ModuleType, two_sections: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def fake(command: list[str], *, timeout: float, stderr: object, check: bool) -> object:
        commands.append(command)
        if "second" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        stderr.write("some lines\nCUDA error: an illegal memory access was encountered\n")  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(command, -6)

    monkeypatch.setattr(gpu.subprocess, "run", fake)
    code, results, _ = run(gpu, tmp_path, "--sections", "first,second")
    first, second = results["sections"]  # type: ignore[misc]
    assert code == 1
    assert first["status"] == "failed"
    assert first["error"] == "ended with -6: CUDA error: an illegal memory access was encountered"
    assert (second["status"], second["error"]) == ("timed out", "after 60 s")
    assert commands[0][2:4] == ["--section", "first"]
    _, results, text = run(gpu, tmp_path, "--budget-s", "1")
    assert {one["status"] for one in results["sections"]} == {"no time left"}  # type: ignore[attr-defined]
    assert "**first no time left**: of --budget-s 1" in text


def test_a_goal_that_is_missed_is_said(gpu: ModuleType, two_sections: None, tmp_path: Path) -> None:
    def slow(bench: object) -> None:
        bench.small = False  # type: ignore[attr-defined]
        bench.at_least("decode", 0.5, 0.85, "of bandwidth", "a|b")  # type: ignore[attr-defined]

    sys.modules["made_up"].good = slow  # type: ignore[attr-defined]
    code, _, text = run(gpu, tmp_path, "--small", "--sections", "second")
    assert code == 1
    assert "- **not reached**: second: decode" in text
    assert "| decode | 0.5 of bandwidth | >= 0.85 | **no** | a\\|b |" in text


def test_an_unknown_section_is_refused(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "kernels,nothing"])
    assert "unknown section 'nothing'; there are: kernels, speeds" in capsys.readouterr().err


def test_pauses_of_a_device_are_what_no_kernel_covers(load_script: LoadScript) -> None:
    def event(ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur}

    device_pauses = load_script("benchmarks.gpu.models").device_pauses
    events = [
        event(30, 10),
        event(0, 10),
        event(5, 10, "gpu_memcpy"),
        event(17, 3),  # after a short pause
        event(16, 100, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    pauses = device_pauses(events)
    assert pauses.span_s == pytest.approx(40e-6)
    assert (pauses.idle_share, pauses.long_share) == (12 / 40, 10 / 40)
    assert pauses.num_pauses == 1
    later = device_pauses(events, skipped=0.5)
    assert (later.span_s, later.idle_share) == (pytest.approx(23e-6), 10 / 23)


def test_the_engine_can_do_without_what_only_the_server_needs() -> None:
    """Where there is a GPU there may be torch and little else."""
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'shtab', 'pydantic', 'starlette'):\n"
        "    sys.modules[name] = None\n"
        "import quire\n"
        "assert quire.LLM\n"
        "import quire.assembly.build, quire.bench.contenders, benchmarks.memory.load\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_checks_side_by_side_come_back_in_order_and_a_failed_one_leaves_the_rest(
    load_script: LoadScript, tmp_path: Path
) -> None:
    checks = load_script("benchmarks.gpu.checks")
    bench = checks.Bench("kernels", tmp_path, tmp_path / "rows", deadline_s=monotonic() + 120)
    fine, bad = partial(checks.Bench.check, name="fine", ok=True), checks.Bench.at_most
    given = [checks.Check("first", bad), checks.Check("second", fine), checks.Check("third", fine)]
    first, *rest = checks.spread(bench, given)
    assert first.check == given[0] and first.error.startswith("TypeError")
    assert [[row.name for row in one.rows] for one in rest] == [["fine"]] * 2
    assert not bench.rows and not bench.out.exists()


def test_checks_that_have_no_time_left_are_given_up(
    load_script: LoadScript, tmp_path: Path
) -> None:
    checks = load_script("benchmarks.gpu.checks")
    bench = checks.Bench("kernels", tmp_path, tmp_path / "rows", deadline_s=monotonic())
    assert list(checks.spread(bench, [checks.Check("slow", partial(sleep, 60))])) == []
