"""The two files of a batch: what is refused, and what an earlier run left behind."""

import json
from pathlib import Path

import pytest

from quire.errors import ConfigurationError
from quire.server.batch.files import BatchInput, BatchOutput

URLS = ("/v1/chat/completions", "/v1/completions")


def call(custom_id="a", url="/v1/completions", **others):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"n": 1}} | others


def written(path, *lines):
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    )
    return path


def test_calls_come_in_the_order_of_the_file(tmp_path):
    path = written(tmp_path / "in", call("b"), "", call("a", body={"x": [1, "ü"]}, unknown=3))
    found = BatchInput(path, URLS)
    assert found.custom_ids == {"a", "b"}
    calls = list(found.calls())
    assert [each.custom_id for each in calls] == ["b", "a"]
    assert json.loads(calls[1].body) == {"x": [1, "ü"]}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no calls in it"),
        ([call(), "{oops"], "line 2 of .* is no call"),
        ([call(), "[1]"], "line 2 of .* is no call"),
        ([{"custom_id": "a"}], "line 1 .* missing required field `url`"),
        ([call(), call()], "line 2 .* has the custom_id 'a' of an earlier line"),
        ([call(url="/v1/complets")], "line 1 .* did you mean '?/v1/completions"),
        ([call(url="/v1/files")], "line 1 .* a batch may call /v1/chat/completions, /v1/compl"),
        ([call(method="GET")], "line 1 .* the method 'GET'"),
        ([call(custom_id="")], "line 1 .* custom_id of 0 characters"),
        ([call(custom_id="x" * 513)], "line 1 .* custom_id of 513 characters"),
        ([call(body=[1])], "line 1 .* no object"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_its_line(tmp_path, lines, reason):
    with pytest.raises(ConfigurationError, match=reason):
        BatchInput(written(tmp_path / "in", *lines), URLS)


def test_missing_input_and_output_folder_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere can't be read: No such file"):
        BatchInput(tmp_path / "nowhere", URLS)
    with pytest.raises(ConfigurationError, match="can't be written"):
        BatchOutput(tmp_path / "no" / "folder", {"a"})


@pytest.mark.parametrize("num_bytes", range(1, 40))
def test_a_line_that_was_cut_off_is_taken_away_wherever_it_was_cut(tmp_path, num_bytes):
    path = tmp_path / "out"
    with BatchOutput(path, {"a", "b"}) as output:
        output.write("a", {"custom_id": "a", "response": {"body": "x\ny"}})
        size = path.stat().st_size
        output.write("b", {"custom_id": "b", "response": {"body": "z"}})
    with path.open("r+b") as file:
        file.truncate(min(size + num_bytes, path.stat().st_size - 1))
    with BatchOutput(path, {"a", "b"}) as output:
        assert output.answered == {"a"}
        assert path.stat().st_size == size
        output.write("b", {"custom_id": "b"})
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [("hello", "line 1 of .* is no answer"), ({"custom_id": "z"}, "answer to 'z'")],
)
def test_a_file_with_something_else_in_it_is_left_alone(tmp_path, line, reason):
    path = written(tmp_path / "out", line)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=reason):
        BatchOutput(path, {"a"})
    assert path.read_bytes() == before


def test_answers_are_for_their_owner_alone_but_a_file_keeps_its_mode(tmp_path):
    new, shared = tmp_path / "new.jsonl", tmp_path / "shared.jsonl"
    shared.touch()
    shared.chmod(0o664)
    for path, mode in ((new, 0o600), (shared, 0o664)):
        with BatchOutput(path, {"a"}) as output:
            output.write("a", {"custom_id": "a"})
        assert path.stat().st_mode & 0o777 == mode


def test_a_device_is_written_and_never_read():
    with BatchOutput(Path("/dev/null"), {"a"}) as output:
        output.write("a", {"custom_id": "a"})
        assert output.answered == {"a"}


def test_a_full_disk_is_the_systems_own_error():
    with (
        pytest.raises(OSError, match=r"No space left on device; .* again later: '/dev/full'"),
        BatchOutput(Path("/dev/full"), {"a"}) as output,
    ):
        output.write("a", {"custom_id": "a"})
