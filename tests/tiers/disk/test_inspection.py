"""What a cache folder is said to hold, before and after it was damaged and emptied."""

import os
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, broken_disk, disk_bytes
from tests.tiers.disk.store_world import (
    FINGERPRINT,
    OTHER,
    Opened,
    name_of,
    payload_of,
    segments,
    write,
)

from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.inspection import NamespaceReport, empty, inspect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two namespaces, of 8 and 3 contents; the second is left unsealed."""
    for fingerprint, numbers in ((FINGERPRINT, range(8)), (OTHER, range(3))):
        opened = Opened(tmp_path, fingerprint=fingerprint)
        write(opened.store, numbers)
        opened.close(seals=fingerprint == FINGERPRINT)
    return tmp_path


def reports(path: Path, files: FaultyFiles | None = None) -> dict[bytes, NamespaceReport]:
    opened = CacheFolder.open(path, files)
    found = {report.fingerprint: report for report in inspect(opened, reads_payloads=True)}
    opened.close()
    return found


def test_sound_namespaces_are_said_to_be_sound(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found = reports(folder)
    assert {key: report.num_contents for key, report in found.items()} == {
        FINGERPRINT: 8,
        OTHER: 3,
    }
    assert all(report.is_sound for report in found.values())
    assert sum(report.num_bytes for report in found.values()) == disk_bytes(folder)
    sealed = [report.segments[0].contents for report in found.values()]
    assert [contents.is_sealed for contents in sealed if contents] == [True, False]
    assert os.listdir("/proc/self/fd") == before


def test_damage_is_counted_where_it_is(folder: Path) -> None:
    [path] = segments(folder)
    content = bytearray(path.read_bytes())
    content[content.index(payload_of(name_of(3)))] ^= 1
    path.write_bytes(content)
    found = reports(folder)
    assert not found[FINGERPRINT].is_sound and found[OTHER].is_sound
    assert found[FINGERPRINT].segments[0].num_damaged == 1
    opened = CacheFolder.open(folder)
    [quick, _] = inspect(opened, reads_payloads=False)
    assert quick.is_sound and quick.segments[0].num_damaged is None
    opened.close()
    path.write_bytes(b"something else")
    found = reports(folder)
    assert not found[FINGERPRINT].is_sound and found[FINGERPRINT].segments[0].num_records == 0


def test_a_file_that_cannot_be_read_is_reported(folder: Path) -> None:
    files = FaultyFiles()
    [path] = segments(folder)
    files.fails_when = lambda name, given: (
        broken_disk() if name == "open_to_read" and given[0] == path else None
    )
    found = reports(folder, files)
    assert found[FINGERPRINT].segments[0].error is not None
    assert not found[FINGERPRINT].is_sound and found[OTHER].is_sound


def test_an_emptied_folder_keeps_its_secret_and_what_is_not_ours(folder: Path) -> None:
    (folder / OTHER.hex() / "notes").write_text("mine")
    size = disk_bytes(folder)
    opened = CacheFolder.open(folder)
    assert empty(opened) == size > 0
    assert sorted(os.listdir(folder)) == [OTHER.hex(), "lock", "secret"]
    assert os.listdir(folder / OTHER.hex()) == ["notes"]
    assert empty(opened) == 0
    opened.close()
