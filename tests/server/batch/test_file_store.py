"""Stored files: owners, bounds, and what a server finds that was ended in the middle."""

import pytest

from quire.errors import BodyTooLongError, ConfigurationError, InvalidRequestError
from quire.server.batch.file_store import FileStore, FileUpload
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
    (tmp_path / "file-1.part").write_bytes(b"half")
    (tmp_path / "file-2").write_bytes(b"without a record")
    assert stored(tmp_path).listed(ALICE) == [file]
    assert {path.name for path in tmp_path.iterdir()} == {file.id, f"{file.id}.json"}


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "mine.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="is no record of a batch folder"):
        stored(tmp_path)
