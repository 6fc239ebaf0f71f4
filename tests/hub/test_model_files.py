"""Every fault of a small file names the file."""

import os

import pytest

from quire.errors import CheckpointError, shown
from quire.hub.model_files import MAX_JSON_BYTES, read_json_object, shown_name, shown_text


def test_reads_an_object(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, "ü"]}', encoding="utf-8")
    assert read_json_object(tmp_path / "config.json") == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
    ],
)
def test_other_contents_are_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)


def test_a_missing_folder_and_a_missing_file_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        read_json_object(tmp_path / "nowhere" / "config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_json_object(tmp_path / "config.json")


def test_paths_that_are_no_files_are_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"\n <!DOCTYPE HTML><html></html>", "a web page, not the file itself"),
        (b"GGUF\x03\0\0\0", "a model in GGUF format under another"),
        (b'{"a": 1, "b": 2, "a": 1}', "the name a occurs twice in one object"),
        (b'{"a": {"b": 1, "b": 1}}', "the name b occurs twice in one object"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": "\n"}', "is not JSON: Invalid control character"),
        (b'["' + b"x" * 5000 + b'"]', "must hold a JSON object"),
    ],
)
def test_invalid_json_is_described_in_one_line(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_file_that_is_far_too_long_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"has more than \d+ bytes, too many"):
        read_json_object(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="is not a file"):
        read_json_object(tmp_path / "config.json")


def test_shown_values_are_short_and_printable():
    for value in ("x" * 10_000, list(range(10_000)), 10**4000, {"a\n": "\ud800\x1b[2J"}, None):
        assert len(shown(value)) < 200 and shown(value).isprintable()
    assert (shown("a"), shown([1, "b"]), shown(0.5)) == ("'a'", "[1, 'b']", "0.5")
    assert (shown_name("model.norm.weight"), shown_name("a\nb")) == ("model.norm.weight", r"'a\nb'")
    assert shown_text("two\nlines \x1b and " + "x" * 1000).startswith("two lines ? and xxx")
    assert len(shown_text("x" * 1000)) < 400


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json_object(tmp_path / "config.json") == {}
