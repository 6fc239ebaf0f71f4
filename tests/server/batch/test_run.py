"""Whole batches by the command, on the embedded model: answers, errors, a kill in the middle."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

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


def run(*words):
    done = subprocess.run(
        [*COMMAND, *map(str, words), *ENGINE], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done


def answers(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a call was answered twice"
    return found


def texts(path):
    return {
        name: line["response"]["body"]["choices"][0]["text"] for name, line in answers(path).items()
    }


def test_each_call_gets_its_answer_or_its_error(tmp_path):
    chat = {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 4}
    calls = [
        completion(0),
        completion(1, max_tokens=-3),
        completion(2, stream=True),
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
    ]
    path = tmp_path / "out.jsonl"
    done = run(written(tmp_path / "in.jsonl", calls), "-o", path)
    assert done.returncode == 0, done.stderr
    assert "4 calls answered, 2 of them errors" in done.stdout
    found = answers(path)
    assert found.keys() == {"call-0", "call-1", "call-2", "chat"}
    assert found["call-0"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["call-1"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert found["call-2"]["response"]["body"]["error"]["param"] == "stream"
    assert all(line["error"] is None and line["id"] for line in found.values())


def test_a_batch_that_was_killed_goes_on_where_it_was(tmp_path):
    calls = [completion(n % 20, max_tokens=64) | {"custom_id": f"call-{n}"} for n in range(40)]
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
    psutil.wait_procs(children, TIMEOUT_S)  # the engine sees that its front has gone
    num_before = len(path.read_bytes().splitlines(keepends=True))
    done = run("-i", file, "-o", path)
    assert done.returncode == 0, done.stderr
    assert "calls have an answer" in done.stdout
    assert num_before < 40
    found = texts(path)
    assert [found[f"call-{n}"] for n in range(20)] == [found[f"call-{n + 20}"] for n in range(20)]


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
