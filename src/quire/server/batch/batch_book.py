"""The batches of all tenants: their states in OpenAI's form, kept in a folder across restarts.

Called by the routes of batches, and by `background`, which answers the calls.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from quire.errors import ConfigurationError, InvalidRequestError
from quire.server.batch.file_store import (
    FileStore,
    new_file_id,
    read_records,
    storage_errors,
    write_record,
)
from quire.server.config import ServerConfig
from quire.server.generation.answer_store import Owner

MAX_BATCHES = 1000
MAX_UNFINISHED = 64
"""The maximum numbers of one tenant's batches, and of those that have not ended. Above MAX_BATCHES,
the oldest batch that has ended is forgotten."""

Status: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
"""Statuses that never change."""


class BatchError(msgspec.Struct):
    """A reason why a batch has failed."""

    message: str
    code: str = "invalid_batch"
    param: str | None = None
    #: Always null; the message names the line.
    line: int | None = None


class BatchErrors(msgspec.Struct):
    """The reasons why a batch has failed."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Numbers of a batch's calls."""

    total: int = 0
    #: Calls that were answered without an error.
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch in OpenAI's form. Times are in seconds since 1970, and null until they have come."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    #: File of the answers; null before the end, and if no call was answered.
    output_file_id: str | None = None
    #: File of the errors; null before the end, and if there is none.
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class _BatchRecord(msgspec.Struct):
    owner: Owner
    batch: Batch


class BatchBook:
    """All batches by id, and the files of all owners.

    Invariant: each change of a batch's status is in the folder when the method returns.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int,
        max_tenant_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the batches of `folder`, which is made if it does not exist, and which no other
        server may use. `clock` is in seconds since 1970. Raises ConfigurationError."""
        self._clock = clock
        self._folder = folder / "batches"
        try:
            for each in (folder, self._folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
            _lock(self._lock, folder)
            self.files = FileStore(folder / "files", max_file_bytes, max_tenant_bytes)
            records = read_records(self._folder, _BatchRecord)
        except OSError as error:
            raise ConfigurationError(
                f"the batch folder {folder} can't be used: {error.strerror}"
            ) from error
        self._records = {each.batch.id: each for each in records}
        #: Called with each new batch, and with each batch that is to be cancelled.
        self.on_change: Callable[[Batch], None] = lambda _: None

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)

    def find(self, owner: Owner, batch_id: str) -> Batch | None:
        """The owner's batch of this id."""
        record = self._records.get(batch_id)
        return record.batch if record is not None and record.owner == owner else None

    def listed(self, owner: Owner) -> list[Batch]:
        """The owner's batches, the oldest first."""
        found = [each.batch for each in self._records.values() if each.owner == owner]
        return sorted(found, key=lambda batch: batch.created_at)

    def unfinished(self) -> list[Batch]:
        """The batches of all owners that have not ended, the oldest first."""
        found = [each.batch for each in self._records.values() if not each.batch.has_ended]
        return sorted(found, key=lambda batch: batch.created_at)

    def owner_of(self, batch: Batch) -> Owner:
        """The owner of a batch of this book."""
        return self._records[batch.id].owner

    def is_in_use(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        return any(batch.input_file_id == file_id for batch in self.unfinished())

    def working_paths(self, batch: Batch) -> tuple[Path, Path]:
        """The files of the answers and of the errors before the batch has ended."""
        return self._folder / f"{batch.id}.answers", self._folder / f"{batch.id}.errors"

    def create(
        self,
        owner: Owner,
        endpoint: str,
        input_file_id: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Begin a batch. Raises InvalidRequestError if the tenant has too many, or no room for the
        answers; StorageError."""
        self.files.check_room(owner)
        own = [each for each in self._records.values() if each.owner.tenant == owner.tenant]
        if sum(not each.batch.has_ended for each in own) >= MAX_UNFINISHED:
            raise InvalidRequestError(
                f"one tenant may have {MAX_UNFINISHED} batches that have not ended; wait for one,"
                " or cancel it"
            )
        if len(own) >= MAX_BATCHES:
            ended = [each.batch for each in own if each.batch.has_ended]
            self._forget(min(ended, key=lambda batch: batch.created_at))
        now_s = int(self._clock())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=f"{window_s // 3600}h",
            status="validating",
            created_at=now_s,
            expires_at=now_s + window_s,
            metadata=None if metadata is None else dict(metadata),
        )
        record = _BatchRecord(owner, batch)
        with storage_errors():
            write_record(self._path(batch), record)  # first, since this may fail
        self._records[batch.id] = record
        self.on_change(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """Begin to end a batch early. Raises InvalidRequestError if it has ended, StorageError."""
        if batch.has_ended or batch.status == "finalizing":
            raise InvalidRequestError(
                f"the batch {batch.id} is {batch.status}, so it can't be cancelled", "batch_id"
            )
        if batch.status != "cancelling":
            with storage_errors():
                self.set_status(batch, "cancelling")
            self.on_change(batch)

    def fail(self, batch: Batch, message: str) -> None:
        """End a batch whose calls can't be made."""
        batch.errors = BatchErrors([BatchError(message)])
        for path in self.working_paths(batch):
            path.unlink(missing_ok=True)
        self.set_status(batch, "failed")

    def set_status(self, batch: Batch, status: Status) -> None:
        """Change a batch's status, and record the time. If this raises OSError, nothing changes."""
        changes: dict[str, Any] = {"status": status, f"{status}_at": int(self._clock())}
        changed = msgspec.structs.replace(batch, **changes)
        write_record(self._path(batch), _BatchRecord(self.owner_of(batch), changed))
        for name, value in changes.items():
            setattr(batch, name, value)

    def publish(self, batch: Batch, status: Status) -> None:
        """End a batch: make the files of its answers and errors findable. A crash within this
        method is repaired when it is called again after a restart."""
        answers, errors = self.working_paths(batch)
        owner = self.owner_of(batch)
        if answers.exists() and answers.stat().st_size:
            batch.output_file_id = batch.output_file_id or new_file_id()
        if errors.exists() and errors.stat().st_size:
            batch.error_file_id = batch.error_file_id or new_file_id()
        self._write(batch)  # so that a repeated call uses the same ids
        for path, file_id, kind in (
            (answers, batch.output_file_id, "output"),
            (errors, batch.error_file_id, "error"),
        ):
            if file_id is None:
                path.unlink(missing_ok=True)
            else:
                self.files.add(owner, path, file_id, f"{batch.id}_{kind}.jsonl", "batch_output")
        self.set_status(batch, status)

    def _forget(self, batch: Batch) -> None:
        del self._records[batch.id]
        self._path(batch).unlink(missing_ok=True)

    def _write(self, batch: Batch) -> None:
        write_record(self._path(batch), self._records[batch.id])

    def _path(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.json"


def open_batches(server: ServerConfig) -> BatchBook | None:
    """The batches in the server's folder; None without one. Raises ConfigurationError."""
    if server.batch_dir is None:
        return None
    return BatchBook(
        Path(server.batch_dir),
        max_file_bytes=server.max_batch_file_bytes,
        max_tenant_bytes=server.max_tenant_batch_bytes,
    )


def _lock(descriptor: int, folder: Path) -> None:
    """Lock the folder until the descriptor is closed. Raises ConfigurationError if another process
    has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"another server uses the batch folder {folder}; name another one"
        ) from error
