"""The table of cases says what works, what fails and what is not installed."""

import sys

import pytest
from benchmarks.clients import all_clients, cases


def fail(url: str, model: str) -> None:
    raise ValueError("line\nbreak")


async def work(url: str, model: str) -> None:
    assert (url, model) == ("http://x", "embedded")


def table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[str], object]:
    """The rows of three cases, and the exit code."""
    registered = {("pytest", "a"): work, ("pytest", "b"): fail, ("no-such-client", "c"): fail}
    monkeypatch.setattr(cases, "CASES", registered)
    monkeypatch.setattr(sys, "argv", ["cases", "--url", "http://x", *arguments])
    with pytest.raises(SystemExit) as ended:
        cases.main()
    return capsys.readouterr().out.splitlines(), ended.value.code


def test_each_case_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, code = table(monkeypatch, capsys)
    assert code == 1
    version = pytest.__version__
    assert rows == [
        f"| pytest {version} | a | works |",
        f"| pytest {version} | b | ValueError: line break |",
        "| no-such-client  | c | skipped: not installed |",
    ]


def test_missing_client_is_skipped_without_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table(monkeypatch, capsys, "--only", "no-such-client")[1] == 0


def test_without_node_the_clients_in_javascript_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    monkeypatch.setattr(all_clients.shutil, "which", lambda name: None)
    group = all_clients.GROUPS["javascript"]
    group.install(tmp_path / "js")
    assert group.run(tmp_path / "js", "http://x") == 0
    assert "skipped: Node.js" in capsys.readouterr().out
    assert not (tmp_path / "js").exists()
