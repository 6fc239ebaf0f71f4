"""The states of batches, on disk and after a crash at any place."""

import errno

import pytest

from quire.errors import ConfigurationError, InvalidRequestError
from quire.server.batch import batch_book
from quire.server.batch.batch_book import BatchBook
from quire.server.batch.file_store import StorageError
from quire.server.generation.answer_store import Owner

ALICE, BOB = Owner("alice"), Owner("bob")


def book(folder, **bounds):
    sizes = {"max_file_bytes": 1000, "max_tenant_bytes": 1 << 20, "clock": lambda: 50.0}
    return BatchBook(folder, **sizes | bounds)


def begin(found, owner=ALICE):
    return found.create(owner, "/v1/completions", "file-x", 24 * 3600, {"a": "b"})


def test_a_batch_is_its_owner_s_alone_and_outlives_the_server(tmp_path):
    found = book(tmp_path)
    batch = begin(found)
    assert (batch.status, batch.completion_window, batch.expires_at) == ("validating", "24h", 86450)
    found.set_status(batch, "in_progress")
    found.close()
    again = book(tmp_path)
    assert again.listed(ALICE) == [batch] == again.unfinished() and batch.in_progress_at == 50
    assert again.find(BOB, batch.id) is None and again.listed(BOB) == []
    assert again.is_in_use("file-x") and not again.is_in_use("file-y")


def test_new_folders_are_their_owner_s_alone(tmp_path):
    book(tmp_path / "new" / "batches")
    for path in ("new/batches", "new/batches/batches", "new/batches/files"):
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o700


def test_two_servers_can_t_share_a_folder(tmp_path):
    first = book(tmp_path)
    with pytest.raises(ConfigurationError, match="another server uses the batch folder"):
        book(tmp_path)
    first.close()
    book(tmp_path)


def test_a_folder_that_can_t_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/sub can't be used"):
        book(tmp_path / "file" / "sub")


@pytest.mark.parametrize("crash", ["ids", "first", "both"])
def test_answers_are_published_once_although_the_server_ends_meanwhile(
    tmp_path, monkeypatch, crash
):
    found = book(tmp_path)
    batch = begin(found)
    for path, text in zip(found.working_paths(batch), ("answer\n", "error\n"), strict=True):
        path.write_text(text)
    found.set_status(batch, "finalizing")
    add, adds = found.files.add, []

    def add_or_crash(*arguments):
        if len(adds) == {"ids": 0, "first": 1, "both": 2}[crash]:
            raise KeyboardInterrupt
        adds.append(arguments)
        return add(*arguments)

    if crash == "both":
        monkeypatch.setattr(found, "set_status", lambda *_: add_or_crash())
    monkeypatch.setattr(found.files, "add", add_or_crash)
    with pytest.raises(KeyboardInterrupt):
        found.publish(batch, "completed")
    found.close()
    again = book(tmp_path)
    (batch,) = again.unfinished()
    again.publish(batch, "completed")
    assert again.unfinished() == [] and batch.completed_at == 50
    for file_id, text in ((batch.output_file_id, "answer\n"), (batch.error_file_id, "error\n")):
        assert again.files.path_of(file_id).read_text() == text
        assert again.files.find(ALICE, file_id).purpose == "batch_output"
    assert len(again.files.listed(ALICE)) == 2


def test_empty_files_are_not_published_and_failures_leave_none(tmp_path):
    found = book(tmp_path)
    batch, failed = begin(found), begin(found)
    for each in (batch, failed):
        for path in found.working_paths(each):
            path.touch()
    found.publish(batch, "completed")
    found.fail(failed, "line 1 is wrong")
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert failed.errors.data[0].message == "line 1 is wrong" and failed.failed_at == 50
    assert not any(path.exists() for each in (batch, failed) for path in found.working_paths(each))


def test_the_numbers_of_batches_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_book, "MAX_UNFINISHED", 2)
    monkeypatch.setattr(batch_book, "MAX_BATCHES", 3)
    found = book(tmp_path)
    first, second = begin(found), begin(found)
    with pytest.raises(InvalidRequestError, match="2 batches that have not ended"):
        begin(found)
    begin(found, BOB)
    for batch in (first, second):
        found.publish(batch, "cancelled")
    begin(found)
    begin(found)
    assert len(found.listed(ALICE)) == 3 and {first.id, second.id} & {
        batch.id for batch in found.listed(ALICE)
    }


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    found = book(tmp_path)
    batch = begin(found)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(batch_book, "write_record", full)
        for change in (lambda: begin(found), lambda: found.cancel(batch)):
            with pytest.raises(StorageError):
                change()
    assert found.unfinished() == [batch]
    assert (batch.status, batch.cancelling_at) == ("validating", None)


def test_a_batch_that_has_ended_can_t_be_cancelled(tmp_path):
    found = book(tmp_path)
    batch, changes = begin(found), []
    found.on_change = changes.append
    found.cancel(batch)
    found.cancel(batch)
    assert (batch.status, batch.cancelling_at, changes) == ("cancelling", 50, [batch])
    found.publish(batch, "cancelled")
    with pytest.raises(InvalidRequestError, match="is cancelled, so it can't be cancelled"):
        found.cancel(batch)
