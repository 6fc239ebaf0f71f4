"""Stored files: owners, bounds, and what a server finds that was ended in the middle."""

import errno
import os
import resource

import pytest

from quire.errors import BodyTooLongError, ConfigurationError, InvalidRequestError
from quire.server.batch.file_store import FileStore, FileUpload, StorageError, new_file_id
from quire.server.generation.answer_store import Owner

ALICE, BOB = Owner("alice"), Owner("bob")


def stored(folder, max_file_bytes=100, max_tenant_bytes=20_000):
    return FileStore(folder, max_file_bytes, max_tenant_bytes)


def upload(store, owner, content=b"abc"):
    with FileUpload(store, owner) as being_sent:
        being_sent.write(content)
        return being_sent.finish("calls.jsonl", "batch")


def test_a_file_is_its_owner_s_alone_and_outlives_the_server(tmp_path):
    file = upload(stored(tmp_path), ALICE)
    again = stored(tmp_path)
    assert again.find(ALICE, file.id) == file and again.listed(ALICE) == [file]
    assert again.find(BOB, file.id) is None and again.listed(BOB) == []
    assert again.find(Owner("alice", "other"), file.id) is None
    path = again.path_of(file.id)
    assert path.read_bytes() == b"abc" and path.stat().st_mode & 0o777 == 0o600
    again.delete(file.id)
    assert list(tmp_path.iterdir()) == [] and stored(tmp_path).listed(ALICE) == []


def test_long_files_and_full_stores_are_refused_and_leave_nothing(tmp_path):
    store = stored(tmp_path, max_tenant_bytes=9000)
    with pytest.raises(BodyTooLongError, match="longer than 100 bytes"):
        upload(store, ALICE, b"x" * 101)
    file = upload(store, ALICE)
    upload(store, ALICE)
    with pytest.raises(InvalidRequestError, match="9000 bytes in all"):
        upload(store, ALICE)
    upload(store, BOB)
    store.delete(file.id)
    upload(store, ALICE)
    assert len(list(tmp_path.iterdir())) == 2 * 3


def test_what_a_crash_left_behind_is_removed(tmp_path):
    store = stored(tmp_path)
    file, lost = upload(store, ALICE), upload(store, ALICE)
    store.path_of(lost.id).unlink()
    (tmp_path / f"{new_file_id()}.part").write_bytes(b"half")
    (tmp_path / new_file_id()).write_bytes(b"without a record")
    assert stored(tmp_path).listed(ALICE) == [file]
    assert {path.name for path in tmp_path.iterdir()} == {file.id, f"{file.id}.json"}


def test_files_that_are_not_the_server_s_stay(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "file-1").mkdir()
    stored(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.txt", "file-1"}


def test_files_of_one_second_are_listed_in_their_order(tmp_path):
    store = stored(tmp_path, max_tenant_bytes=1 << 20)
    files = [upload(store, ALICE) for _ in range(9)]
    assert store.listed(ALICE) == files


@pytest.mark.parametrize("when", ["write", "record"])
def test_a_full_disk_is_named_and_nothing_stays(tmp_path, monkeypatch, when):
    store = stored(tmp_path, max_tenant_bytes=9000)
    number = resource.RLIMIT_FSIZE
    before = resource.getrlimit(number)
    with monkeypatch.context() as patched:
        if when == "record":
            patched.setattr(os, "fsync", full)
        else:
            resource.setrlimit(number, (2, before[1]))  # Python ignores SIGXFSZ
        try:
            with pytest.raises(StorageError, match="can't store this now"):
                upload(store, ALICE)
        finally:
            resource.setrlimit(number, before)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):  # the room is free again
        upload(store, ALICE)


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "mine.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="is no record of a batch folder"):
        stored(tmp_path)
