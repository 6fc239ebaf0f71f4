"""Whole batches by the command, on the embedded model: answers, errors, a kill in the middle."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quire.server.batch.run import Tally

COMMAND = [sys.executable, "-m", "quire", "batch"]
ENGINE = ["--num-blocks", "256", "--max-num-seqs", "4", "--max-model-len", "512"]
TIMEOUT_S = 60


def completion(number, **fields):
    body = {"prompt": f"def f{number}(", "max_tokens": 24, "seed": number} | fields
    url = "/v1/completions"
    return {"custom_id": f"call-{number}", "method": "POST", "url": url, "body": body}


def written(path, calls):
    path.write_text("".join(json.dumps(call) + "\n" for call in calls))
    return path


def answers(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a call was answered twice"
    return found


def test_a_batch_that_was_killed_goes_on_where_it_was(tmp_path):
    chat = {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 4}
    calls = [completion(n % 20, max_tokens=64) | {"custom_id": f"call-{n}"} for n in range(40)]
    calls += [
        completion(41, max_tokens=-3),
        completion(42, stream=True),
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
    ]
    file = written(tmp_path / "in.jsonl", calls)
    path = tmp_path / "out.jsonl"
    process = subprocess.Popen([*COMMAND, file, "-o", path, *ENGINE], stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + TIMEOUT_S
        while not path.exists() or path.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.005)
        children = psutil.Process(process.pid).children()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
    num_before = len(path.read_bytes().splitlines(keepends=True))
    words = [*COMMAND, "-i", file, "-o", path, *ENGINE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ calls have an answer", done.stdout)
    assert re.search(r"\d+ calls answered", done.stdout)
    assert num_before < len(calls)
    check_answers(answers(path), calls)
    psutil.wait_procs(children, TIMEOUT_S)  # the engine sees that its API server has gone


def check_answers(found, calls):
    """Each call has its answer or its error, and the same call the same answer."""
    assert found.keys() == {call["custom_id"] for call in calls}
    assert all(line["error"] is None and line["id"] for line in found.values())
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    texts = [bodies[f"call-{n}"]["choices"][0]["text"] for n in range(40)]
    assert texts[:20] == texts[20:]
    assert found["call-0"]["response"]["status_code"] == 200
    assert bodies["chat"]["usage"]["completion_tokens"] == 4
    assert bodies["call-41"]["error"]["param"] == "max_tokens"
    assert bodies["call-42"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-o", "out"], "are required: FILE"),
        (["nowhere.jsonl", "-o", "out"], "nowhere.jsonl can't be read"),
        (["in.jsonl", "-o", "in.jsonl"], "is the file of the calls"),
        (["in.jsonl", "-o", "out", "--max-open-calls", "0"], "no whole number above 0"),
    ],
)
def test_mistakes_are_answered_before_the_model_is_loaded(
    tmp_path, monkeypatch, capsys, words, reason
):
    from quire.cli.main import main

    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", [completion(0)])
    try:
        code = main(["batch", *words])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert reason in capsys.readouterr().err


def test_the_summary_counts_answers_and_errors():
    assert "4 calls answered, 2 of them errors" in Tally(4, 2).summary(Path("out"))
    assert "4 calls answered, in" in Tally(4).summary(Path("out"))
