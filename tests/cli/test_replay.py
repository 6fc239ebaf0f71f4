"""`quire replay`: what it converts, and what it refuses; replays are in tests/replay."""

import json
from pathlib import Path

import pytest
from tests.engine_client.fake_engine_process import COMMAND
from tests.server.launching import launched

from quire.cli.main import main

Capture = pytest.CaptureFixture[str]

TRACE = """\
{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [0]}
{"timestamp": 60000, "input_length": 21, "output_length": 4, "hash_ids": [0]}
{"timestamp": 60000, "input_length": 22, "output_length": 5, "hash_ids": [1]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def run(capsys: Capture, *words: object) -> tuple[int, str]:
    code = main(["replay", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_formats_are_converted(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    azure, back = tmp_path / "azure.csv", tmp_path / "back.jsonl"
    words = ("--convert", "azure", "-o", azure)
    assert run(capsys, trace, "--speed", 60, "--first", 2, *words) == (
        0,
        f"2 requests written to {azure}\n",
    )
    assert azure.read_text() == (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2000-01-01 00:00:00.0000000,20,3\n"
        "2000-01-01 00:00:01.0000000,21,4\n"
    )
    assert run(capsys, azure, "--convert", "mooncake", "-o", back, "--copies", 2)[0] == 0
    rows = [json.loads(line) for line in back.read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 0, 1000, 1000]
    assert [row["hash_ids"] for row in rows] == [[0], [1], [2], [3]]
    assert azure.stat().st_mode & 0o077 == 0, "for its owner alone, as a recording"
    code, printed = run(capsys, trace, *words)
    assert code == 1 and f"{azure} is there already" in printed


def test_a_failed_conversion_leaves_no_file(tmp_path: Path, capsys: Capture) -> None:
    path, new = tmp_path / "trace.jsonl", tmp_path / "new.csv"
    path.write_text('{"timestamp": 1e18, "input_length": 1, "output_length": 1, "hash_ids": []}')
    code, printed = run(capsys, path, "--convert", "azure", "-o", new)
    assert code == 1 and "has times that azure can't say" in printed
    assert not new.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--convert azure", "--convert and -o belong together"),
        ("-o x", "--convert and -o belong together"),
        ("--convert azure -o x --url http://h", "--convert writes a file and asks no server"),
        ("--vocab-size 9", "--vocab-size is about a server; name it with --url"),
        ("m --url http://h", "model would describe an engine to simulate"),
        ("--block-size 32 --convert azure -o x", "--block-size would describe an engine"),
        ("--measure --url http://h", "--measure would describe an engine to simulate"),
        ("--costs none", "were not measured on this machine; --measure does it"),
        ("--speed 0", "speed is 0.0"),
        ("--url 127.0.0.1", "the server's URL is '127.0.0.1'"),
    ],
)
def test_conflicting_options_are_refused(
    words: str, reason: str, trace: Path, capsys: Capture
) -> None:
    code, printed = run(capsys, trace, *words.split())
    assert code == 1 and reason in printed


def test_a_trace_without_requests_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "has no requests" in run(capsys, path)[1]


def test_a_server_gets_it(trace: Path, capsys: Capture) -> None:
    with launched(command=list(COMMAND), fake={"step_s": 0.001}) as server:
        words = (trace, "--speed", 600, "--url", f"{server.url}/v1")
        code, printed = run(capsys, *words)
        assert code == 0 and printed.startswith("3 of 3 requests answered in ")
        code, printed = run(capsys, *words, "--json")
    assert code == 0 and json.loads(printed)["output_tokens"] == 12
