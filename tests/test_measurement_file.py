"""Entries of a file are found under their facts, and damaged ones are left out."""

import json
import os
from pathlib import Path

import pytest

from quire import measurement_file
from quire.errors import ConfigurationError
from quire.measurement_file import MeasurementFile

FACTS = {"model": "abc", "quantization": None}


def _open(path: Path, form: int = 1) -> MeasurementFile:
    return MeasurementFile(path, "things", form, "--things")


def test_an_entry_is_found_under_its_facts_only(tmp_path: Path) -> None:
    path = tmp_path / "below" / "things.json"
    _open(path).store(FACTS, {"figure": 1})
    _open(path).store(FACTS, {"figure": 2})
    _open(path).store({"model": "abd"}, {"figure": 3})
    assert _open(path).find(FACTS) == {"facts": FACTS, "figure": 2}
    assert _open(path).find({"model": "abe"}) is None
    assert [entry["figure"] for entry in _open(path).read().values()] == [2, 3]
    assert [each.name for each in path.parent.iterdir()] == ["things.json"]


def test_another_format_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "things.json"
    _open(path).store(FACTS, {"figure": 1})
    assert _open(path, 2).find(FACTS) is None
    assert "can't be read as a file of stored things" in caplog.text


@pytest.mark.parametrize("entry", [None, 3, {}, {"facts": 3}])
def test_an_entry_without_facts_is_left_out(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "things.json"
    path.write_text(json.dumps({"format": 1, "things": {"key": entry}}))
    assert _open(path).read() == {}


def test_a_place_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"can't be kept .* with --things"):
        _open(tmp_path / "file" / "things.json").store(FACTS, {})


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "\0"])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "things.json"
    path.write_text(text)
    assert _open(path).find(FACTS) is None
    _open(path).store(FACTS, {"figure": 1})
    assert _open(path).find(FACTS) is not None


@pytest.mark.parametrize("name", ["pipe", "folder", ".", "device"])
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    kept = _open(Path(name) if name == "." else tmp_path / name)
    assert kept.find(FACTS) is None
    with pytest.raises(ConfigurationError, match="not a regular file"):
        kept.store(FACTS, {})
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "device").is_symlink()


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("things.json")
    _open(link).store(FACTS, {"figure": 1})
    assert link.is_symlink() and _open(tmp_path / "things.json").find(FACTS) is not None


def test_the_oldest_entries_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_file, "MOST_ENTRIES", 2)
    kept = _open(tmp_path / "things.json")
    for number in (1, 2, 1, 3):
        kept.store({"number": number}, {})
    assert [kept.find({"number": number}) is None for number in (1, 2, 3)] == [False, True, False]
