"""Damaged checkpoints: a few of the script's cases, and that the script finds what is wrong."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.forking import Forks

from quire.errors import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).parents[3]


def test_damaged_checkpoints_are_served_or_refused_in_a_sentence(forks: Forks) -> None:
    """In a process of its own, since each case is a fork of it."""
    words = ("-m", "benchmarks.checkpoints.fuzz", "--cases", "60", "--first", "1")
    status, printed = forks.run(*words)
    assert status == 0, printed
    assert "69 cases" in printed and "0 failures" in printed


@pytest.mark.timeout(300)
def test_damaged_gguf_files_are_served_or_refused_in_a_sentence(forks: Forks) -> None:
    """Cases of the script, and headers of many megabytes."""
    status, printed = forks.run("-m", "benchmarks.checkpoints.fuzz", "--gguf", "--cases", "50")
    assert status == 0, printed
    assert "68 cases" in printed and "0 failures" in printed


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.checkpoints.fuzz")


def _raise(error: Exception) -> list[int]:
    raise error


def _grow() -> list[int]:
    return list((b"x" * (300 << 20))[:1])


def _spin() -> list[int]:
    while True:
        pass


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (lambda: [1], "served"),
        (lambda: _raise(CheckpointError("config.json is not JSON")), "refused"),
        (lambda: _raise(CheckpointError("two\nlines")), "unreadable"),
        (lambda: _raise(KeyError("x")), "traceback"),
        (lambda: _grow(), "grew (served)"),
        (lambda: _spin(), "killed"),
    ],
)
def test_the_script_tells_how_a_case_ended(
    job: Callable[[], list[int]],
    kind: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "killed":
        monkeypatch.setattr(script, "MAX_CPU_S", 0)  # after a second
    case = script.Case(1, [], {"config.json": b"{}"}, "")
    outcome = script.run_case(case, tmp_path / "model", lambda *_: job())
    assert outcome.kind == kind, outcome.text
    assert not (tmp_path / "model").exists()


def test_cases_follow_from_their_number(script: ModuleType) -> None:
    for mutator in (script.Mutator, script.GGUFMutator):
        first, again = mutator(3), mutator(3)
        for number in range(60):
            assert first.draw(number) == again.draw(number)
        assert first.draw(1) != mutator(4).draw(1)


def test_every_bound_is_tried_at_its_ends(script: ModuleType) -> None:
    from quire.models.config_bounds import INTEGERS, NUMBERS

    tried = {case.what[0] for case in script.extremes()[:-3]}
    for name, bounds in (INTEGERS | NUMBERS).items():
        assert f"{name} = {bounds.lowest!r}" in tried and f"{name} = {bounds.highest!r}" in tried
