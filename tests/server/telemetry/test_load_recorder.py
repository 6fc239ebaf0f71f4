"""`--record`: what is in the file, what is not, and that writing it harms nobody."""

import json
import logging
import os
import random
import stat
from array import array
from pathlib import Path

import httpx
import pytest
from tests.server.launching import launched

from quire.core.adapters import AdapterRef
from quire.core.content_spans import ContentSpan
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.errors import ConfigurationError
from quire.hub.model_folder import find_model
from quire.server.telemetry import load_recorder
from quire.server.telemetry.load_recorder import LoadRecorder
from quire.server.telemetry.monitor import Monitor
from quire.text.tokenizer import Tokenizer
from quire.traces.prefix_ids import PrefixIds
from quire.traces.read import read_trace

open_file = os.open
LIMITS = ModelLimits(vocab_size=10**6, max_model_len=4096)
FACTS = {"max_model_len": 4096, "block_size": 16, "kernels": "secret", "num_blocks": 9}


class Clock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Load:
    """A monitor that records, and calls on it."""

    def __init__(self, path: Path, time_ms: int = 1) -> None:
        self.path, self.clock = path, Clock()
        self.recorder = LoadRecorder(path, 64, time_ms, self.clock)
        self.recorder.begin(LIMITS, FACTS)
        self.monitor = Monitor("m", clock=self.clock, recorder=self.recorder)
        self.num_calls = 0

    def call(self, prompt, output, *, n=1, error=None, ends=FinishReason.STOP, **request):
        """A call that takes 1 s to its first token and 2 s in all."""
        self.num_calls += 1
        name = f"id-of-a-call-{self.num_calls}"
        params = DecodingParams(request.pop("max_tokens", 99), temperature=0.0)
        asked = Request(name, prompt, params, n, **request)
        record = self.monitor.open_call([asked], asked.tenant, "name-of-a-client")
        self.clock.now_s += 1
        for branch in range(n):
            if output:
                record.on_output(SequenceOutput(name, branch, output[:1], len(prompt) // 2))
        self.clock.now_s += 1
        for branch in range(n if error is None else 0):
            record.on_output(SequenceOutput(name, branch, output[1:], 0, ends))
        record.close(error)

    def end(self):
        """The lines of the file."""
        self.monitor.close()
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 10**6), k=count)


def test_a_request_s_line_has_its_lengths_blocks_and_times(tmp_path):
    load = Load(tmp_path / "load")
    prompt, output = tokens(1, 150), tokens(2, 50)
    load.call(prompt, output, tenant="alice", cache_domain="alice", max_tokens=60)
    load.clock.now_s += 3
    load.call(prompt + output + [1], [5] * 3, n=2, tenant="alice", cache_domain="alice")
    load.call(prompt, [], error=GeneratorExit(), tenant="bob", cache_domain="bob")
    load.recorder.refuse(load.clock.now_s, 429, "overloaded")
    header, first, second, third, refusal, summary = load.end()
    assert header == {
        **{"line": "recording", "version": 1, "block_tokens": 64, "time_ms": 1},
        **{"max_model_len": 4096, "max_num_seqs": 0, "max_num_batched_tokens": 0},
        **{"block_size": 16, "num_blocks": 9},
    }
    assert first == {
        **{"line": "request", "number": 0, "at_ms": 0, "tenant": 0, "prompt_tokens": 150},
        **{"blocks": [0, 1], "choices": [{"tokens": 50, "end": "stop", "blocks": [2]}]},
        **{"max_tokens": 60, "first_ms": 1000, "took_ms": 2000, "greedy": True, "stream": True},
    }
    assert second["blocks"] == [0, 1, 2]
    assert (second["parent"], second["think_ms"], second["at_ms"]) == (0, 3000, 5000)
    assert second["choices"] == [{"tokens": 3, "end": "stop"}] * 2
    assert third["tenant"] == 1 and third["blocks"] == [3, 4]
    assert third["choices"] == [{"tokens": 0, "end": "disconnect"}] and "first_ms" not in third
    assert refusal["status"] == 429 and refusal["kind"] == "overloaded"
    assert summary == {"line": "summary", "requests": 3, "refusals": 1, "lost": 0}
    assert [each.end for each in read_trace(load.path).requests].count("refused") == 1


def test_a_line_has_the_places_of_contents(tmp_path):
    load = Load(tmp_path / "load")
    spans = (ContentSpan(3, 70, "0" * 32), ContentSpan(80, 1, "1" * 32))
    load.call(tokens(1, 150), [5], content_spans=spans)
    load.call(tokens(1, 150), [5])
    _, first, second, _ = load.end()
    assert first["contents"] == [[3, 70], [80, 1]] and "contents" not in second
    assert first["blocks"] != second["blocks"]


def test_two_recordings_of_one_prompt_share_nothing(tmp_path):
    """The file is a function of lengths, times and equalities: others of the same give the same."""
    files = []
    for seed in (1, 1, 2):
        load = Load(tmp_path / str(len(files)))
        prompt = tokens(seed, 640)
        load.call(prompt, tokens(seed + 10, 70))
        load.call(prompt[:400] + tokens(seed + 20, 100), [1])
        load.call(prompt, [1], adapter=AdapterRef("sql", "/adapters/sql", f"digest {seed}"))
        files.append((load.end(), load.path.read_bytes()))
    assert files[0] == files[1] == files[2]
    assert "digest" not in files[0][1].decode()


def test_times_are_rounded_as_asked(tmp_path):
    load = Load(tmp_path / "load", time_ms=60_000)
    for _ in range(40):
        load.call([1], [2, 3])
    lines = load.end()[1:-1]
    assert {line["at_ms"] for line in lines} == {0, 60_000}
    assert {line["took_ms"] for line in lines} == {0, 60_000}  # the one that crosses half a minute


def test_means_come_only_over_many_requests(tmp_path):
    load = Load(tmp_path / "few")
    load.call([1] * 10, [2, 3])
    assert "hit_rate" not in load.end()[-1]
    load = Load(tmp_path / "many")
    for seed in range(150):
        load.call([7] * 80 + tokens(seed, 20), [2, 3])
    summary = load.end()[-1]
    assert summary["hit_rate"] == 0.5
    assert summary["shared_tail_tokens"] == 16
    assert read_trace(load.path).shared_tail_tokens == 16


def test_unanswered_requests_do_not_count_in_the_hit_rate(tmp_path):
    load = Load(tmp_path / "load")
    for seed in range(150):
        load.call(tokens(seed, 100), [2, 3])
        load.call(tokens(seed, 500), [], error=TimeoutError())  # it ended in the queue
    assert load.end()[-1]["hit_rate"] == 0.5


def test_a_file_that_is_there_is_left_alone(tmp_path):
    path = tmp_path / "load"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"which exists; .* name another file"):
        LoadRecorder(path, 64)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        LoadRecorder(tmp_path / "missing" / "load", 64)


def test_a_recording_that_never_began_leaves_no_file(tmp_path):
    path = tmp_path / "load"
    recorder = LoadRecorder(path, 64)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    limits = ModelLimits(vocab_size=9, max_model_len=9, generates=False)
    with pytest.raises(ConfigurationError, match="only the load of models that generate"):
        recorder.begin(limits, FACTS)
    recorder.close()
    assert not path.exists()


def test_a_full_disk_ends_the_recording_with_one_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(load_recorder.os, "open", lambda *_: open_file("/dev/full", os.O_WRONLY))
    load = Load(tmp_path / "load")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            load.call([1] * 9, [2, 3])
        load.monitor.close()
        load.call([1] * 9, [2, 3])
    (line,) = caplog.messages
    assert line == f"the recording {tmp_path / 'load'} ends here: No space left on device"


def test_a_slow_disk_delays_no_request(tmp_path, caplog, monkeypatch):
    load = Load(tmp_path / "load")
    load.call([1] * 9, [2, 3])
    monkeypatch.setattr(load_recorder, "MAX_WAITING", 0)
    for _ in range(3):
        load.call([1] * 9, [2, 3])
    assert load.end()[-1] == {"line": "summary", "requests": 1, "refusals": 0, "lost": 3}
    assert caplog.messages == [
        f"{load.path} is written more slowly than requests end; some are left out of the recording"
    ]


def test_long_requests_are_left_out_sooner(tmp_path, monkeypatch):
    load = Load(tmp_path / "load")
    monkeypatch.setattr(load_recorder, "MAX_WAITING_TOKENS", 20)
    monkeypatch.setattr(load_recorder, "WRITE_PERIOD_S", 60)
    for _ in range(5):
        load.call([1] * 9, [2, 3])
    assert load.end()[-1] == {"line": "summary", "requests": 2, "refusals": 0, "lost": 3}


def test_the_blocks_of_a_recording_are_bounded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(load_recorder, "PrefixIds", lambda size: PrefixIds(size, max_blocks=3))
    load = Load(tmp_path / "load")
    for seed in range(3):
        load.call(tokens(seed, 256), [1])
    lines = load.end()
    assert [line["line"] for line in lines] == ["recording", "request", "summary"]
    assert lines[-1]["lost"] == 2
    assert caplog.messages[-1] == (
        f"the recording {load.path} ends here, since it has the maximum number of blocks"
    )


def numbers_in(value):
    """All whole numbers, in their order in the file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, int) else []


def windows(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[begin : begin + 8]) for begin in range(len(ids) - 7)}


def test_a_real_server_s_file_has_no_text_no_tokens_and_no_names(tmp_path):
    """Every 8 tokens in a row of prompts and answers are looked for, as numbers, bytes and text."""
    path = tmp_path / "load"
    text = "The ferry to Marmora leaves at seven, and Adelheid Quastenberg has both tickets. " * 6
    body = {"prompt": text, "max_tokens": 80, "ignore_eos": True, "return_token_ids": True}
    keys = ["adelheid:quastenberg-key-1"]
    headers = {"Authorization": "Bearer quastenberg-key-1", "X-Request-ID": "ferry-call-7"}
    body["user"] = "marmora-user-3"
    with launched({"num_blocks": 256}, record=str(path), api_keys=keys) as server:
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
        refused = httpx.post(url, json=body | {"n": 0}, headers=headers, timeout=60)
        assert refused.status_code == 400
        with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers) as stream:
            next(stream.iter_lines())
    written = path.read_bytes()
    lines = [json.loads(line) for line in written.splitlines()]
    assert lines[0]["line"] == "recording"
    request = next(each for each in lines if each["line"] == "request")
    assert request["prompt_tokens"] > 128 and request["choices"][0]["tokens"] == 80
    assert {each.end for each in read_trace(path).requests} == {"length", "disconnect", "refused"}
    tokenizer = Tokenizer.from_folder(find_model(None, None).folder)
    prompt, output = tokenizer.encode(text), answer["choices"][0]["token_ids"]
    seen = windows(numbers_in(lines))
    for ids in (prompt, output):
        assert not windows(ids) & seen
        for window in windows(ids):
            assert tokenizer.decode(list(window)).strip().encode() not in written
            assert not any(array(kind, window).tobytes() in written for kind in "hiq")
    lowered = written.lower()
    names = ("adelheid", "quastenberg", "marmora", "ferry", "cmpl", answer["id"])
    assert not [name for name in names if name.encode() in lowered]
