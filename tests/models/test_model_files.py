"""Every fault of a small file names the file."""

import pytest

from quire.errors import CheckpointError
from quire.models.model_files import read_json_object


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


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        read_json_object(tmp_path / "config.json")
