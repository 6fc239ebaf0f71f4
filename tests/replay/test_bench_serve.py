"""`quire bench serve` as it is typed, against a real API server and an engine that counts up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_client.fake_engine_process import COMMAND
from tests.server.launching import RunningServer, launched

from quire.cli.main import main

KEY = ("--api-key", "bench-key-1")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with launched(
        command=list(COMMAND), fake={"step_s": 0.002}, api_keys=["a:bench-key-1"]
    ) as running:
        yield running


def bench(server: RunningServer, *words: object) -> int:
    return main(["bench", "serve", server.url, *KEY, *map(str, words)])


def test_a_load_is_sent_at_its_rate_and_measured(
    server: RunningServer, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "results.json"
    words = ("--num-prompts", 12, "--input-len", 20, "--output-len", 6, "--request-rate", 40)
    goodput = ("--goodput", "ttft:60000", "e2el:60000", "--max-concurrency", 2)
    assert bench(server, *words, *goodput, "-o", path, "--save-detailed") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("successful requests     12\nfailed requests         0\n")
    found = json.loads(path.read_text())
    assert (found["completed"], found["total_input_tokens"]) == (12, 240)
    assert found["output_lens"] == [6] * 12
    assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == (40, 1, 2)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 1 <= found["max_concurrent_requests"] <= 2
    assert found["start_times"] == sorted(found["start_times"])
    assert 0 < found["median_itl_ms"] <= found["p99_itl_ms"] < found["p99_e2el_ms"]


def test_chats_of_words_need_no_token_ids(
    server: RunningServer, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--backend", "openai-chat", "--num-prompts", 2, "--input-len", 8, "--output-len", 4)
    assert bench(server, *words, "--save-result", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 0, 8)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-chat-infqps-embedded-")
    assert json.loads(path.read_text())["total_input_tokens"] == found["total_input_tokens"] > 16


def test_a_trace_keeps_its_times(server: RunningServer, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": at, "input_length": 9, "output_length": 2, "hash_ids": [at]}
        for at in (0, 100)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench(server, "--dataset-name", "trace", "--dataset-path", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["request_rate"]) == (2, "trace")
    assert found["duration"] >= 0.1


def test_a_line_of_vllms_benchmark_runs_unchanged(server: RunningServer, tmp_path: Path) -> None:
    where = ["--host", "127.0.0.1", "--port", server.url.rpartition(":")[2], *KEY]
    line = (
        "bench serve --backend vllm --model org/tokenizer --served-model-name embedded"
        " --num-prompts 2 --random-input-len 8 --random-output-len 3 --ignore-eos --save-result"
        f" --result-dir {tmp_path} --result-filename found.json"
    )
    assert main([*line.split(), *where]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["backend"], found["model_id"]) == ("vllm", "embedded")
    assert (found["completed"], found["total_output_tokens"]) == (2, 6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--base-url http://h", "two servers are named"),
        ("--host h", "two servers are named"),
        ("--port 1", "two servers are named"),
        ("--result-dir /tmp", "--result-dir alone writes no file; set --save-result, too"),
        ("--result-dir /no/such --save-result", "--result-dir is '/no/such', but there is no such"),
        ("--max-concurrency 0", "--max-concurrency is 0, but must be at least 1"),
        ("--input-len 0", "--input-len is 0, but must be at least 1"),
        ("--metric-percentiles 50,x", "--metric-percentiles is '50,x', but must be numbers"),
        ("--goodput itl:5", "--goodput has 'itl:5'"),
        ("--save-detailed", "--save-detailed alone writes no file; set --save-result, too"),
        ("-o /no/such/r.json", "there is no such folder"),
        ("--request-rate 0", "--request-rate is 0, but must be above 0"),
        ("--input-len 99999 --num-prompts 2", "none fits the model: 2 longer than max_model_len"),
        ("--model other --input-len 8", "does not answer the first request: 404 model_not_found"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    server: RunningServer, words: str, reason: str, capsys: Capture
) -> None:
    assert bench(server, *words.split()) == 1
    assert reason in capsys.readouterr().err
