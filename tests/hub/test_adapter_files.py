"""The stamps of an adapter's files, and the adapters in a folder."""

import os

from quire.hub.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapters_in, file_stamps


def save(folder, text="x"):
    folder.mkdir(exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).write_text(text)
    return str(folder)


def test_stamps_change_with_either_file(tmp_path):
    path = save(tmp_path / "a")
    before = file_stamps(path)
    assert file_stamps(path) == before
    os.utime(tmp_path / "a" / WEIGHTS_FILE, ns=(5, 5))
    assert file_stamps(path) != before


def test_missing_files_have_no_stamp(tmp_path):
    for path in (str(tmp_path / "gone"), "a\0b", "/" + "a" * 5000):
        assert file_stamps(path) == (None, None)


def test_the_adapters_of_a_folder_are_named_by_their_own(tmp_path):
    save(tmp_path / "b")
    save(tmp_path / "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "file").write_text("")
    assert adapters_in(tmp_path) == {"a": tmp_path / "a", "b": tmp_path / "b"}
