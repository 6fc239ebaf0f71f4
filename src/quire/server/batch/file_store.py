"""The files that clients upload for batches, and the files of their answers, in one folder.

Beside each file is a record that names its owner. Only the owner's calls find the file. The records
are read again when the server starts. Called by the routes of files and by `batch_book`.
"""

import contextlib
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from quire.errors import BodyTooLongError, ConfigurationError, InvalidRequestError, QuireError
from quire.observability.log import get_logger
from quire.server.generation.answer_store import Owner

_OVERHEAD_BYTES = 4096
"""Bytes counted for each file in addition to its content. They bound the number of empty files."""

_RECORD = ".json"

_UNFINISHED = re.compile(r"file-[0-9a-f]{32}(\.part|\.new)?")
"""Names of files that a crash may leave without a record."""

Record = TypeVar("Record", bound=msgspec.Struct)

logger = get_logger(__name__)


class StorageError(QuireError):
    """The server's disk takes no files now. The message leaves out what only the operator sees."""

    http_status = 503
    code = "storage_failed"
    retry_after_s = 60.0


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Log an error of the disk, and raise StorageError in its place."""
    try:
        yield
    except OSError as error:
        logger.error("the batch folder can't be written: %s", error)
        raise StorageError("the server can't store this now, because its disk has failed") from None


class StoredFile(msgspec.Struct, frozen=True):
    """A file in OpenAI's form."""

    id: str
    bytes: int
    #: Time of the upload, in seconds since 1970.
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    #: Files never expire.
    expires_at: None = None


class _FileRecord(msgspec.Struct, frozen=True):
    owner: Owner
    file: StoredFile


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace a record's file. A reader finds the old or the new record, never a part of one, even
    after a power failure. Raises OSError, and leaves the old record then."""
    content, new = msgspec.json.encode(record), path.with_suffix(".new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read_records(folder: Path, kind: type[Record]) -> list[Record]:
    """All records of a folder. Raises ConfigurationError for one that is damaged."""
    found = []
    for path in sorted(folder.glob(f"*{_RECORD}")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{path} is no record of a batch folder: {error}; remove it, or name another folder"
            ) from error
    return found


class FileStore:
    """The files of all owners.

    Invariant: each record has a file of the same id; `_num_bytes` is the sum of each tenant's
    files and open uploads, with _OVERHEAD_BYTES for each.
    """

    def __init__(self, folder: Path, max_file_bytes: int, max_tenant_bytes: int) -> None:
        """Reads the records of `folder`, which is made if it does not exist. Raises
        ConfigurationError, OSError."""
        self.max_file_bytes = max_file_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._records: dict[str, _FileRecord] = {}
        for record in read_records(folder, _FileRecord):
            path = self.path_of(record.file.id)
            if path.exists():
                self._records[record.file.id] = record
            else:  # the server ended between the record and the file
                path.with_suffix(_RECORD).unlink()
        self._num_bytes: Counter[str] = Counter()
        for record in self._records.values():
            self._num_bytes[record.owner.tenant] += record.file.bytes + _OVERHEAD_BYTES
        for path in folder.iterdir():  # what an upload that was cut off has left
            if _UNFINISHED.fullmatch(path.name) and path.name not in self._records:
                path.unlink()

    def find(self, owner: Owner, file_id: str) -> StoredFile | None:
        """The owner's file of this id."""
        record = self._records.get(file_id)
        return record.file if record is not None and record.owner == owner else None

    def listed(self, owner: Owner) -> list[StoredFile]:
        """The owner's files, the oldest first."""
        found = [record.file for record in self._records.values() if record.owner == owner]
        return sorted(found, key=lambda file: file.created_at)

    def path_of(self, file_id: str) -> Path:
        """The path of a file's content."""
        return self._folder / file_id

    def delete(self, file_id: str) -> None:
        """Delete a file. Does nothing for an id without a record."""
        record = self._records.pop(file_id, None)
        if record is not None:
            self.path_of(file_id).with_suffix(_RECORD).unlink(missing_ok=True)
            self.path_of(file_id).unlink(missing_ok=True)
            self.count(record.owner, -record.file.bytes - _OVERHEAD_BYTES)

    def count(self, owner: Owner, num_bytes: int) -> None:
        """Add to the counted bytes of a tenant; a negative number subtracts."""
        self._num_bytes[owner.tenant] += num_bytes

    def has_room(self, owner: Owner, num_bytes: int = 0) -> bool:
        """Whether a tenant's files and `num_bytes` keep the bound."""
        return self._num_bytes[owner.tenant] + num_bytes <= self.max_tenant_bytes

    def check_room(self, owner: Owner, num_bytes: int = 0) -> None:
        """Raises InvalidRequestError if a tenant's files and `num_bytes` exceed the bound."""
        if not self.has_room(owner, num_bytes):
            raise InvalidRequestError(
                f"the files of one tenant may have {self.max_tenant_bytes} bytes in all, and there"
                " is no room for more; delete files that are not needed",
                "file",
            )

    def add(
        self, owner: Owner, path: Path, file_id: str, filename: str, purpose: str
    ) -> StoredFile:
        """Move a complete file into the store, under an id of `new_file_id`. May be repeated with
        the same id after a crash."""
        place = self.path_of(file_id)
        size = (path if path.exists() else place).stat().st_size
        kind: Literal["batch", "batch_output"] = "batch" if purpose == "batch" else "batch_output"
        file = StoredFile(file_id, size, int(time.time()), filename, kind)
        record = _FileRecord(owner, file)
        # The record comes first, since files without a record are removed when the server starts.
        write_record(place.with_suffix(_RECORD), record)
        if path.exists():
            path.replace(place)
        if file_id not in self._records:
            self.count(owner, size + _OVERHEAD_BYTES)
        self._records[file_id] = record
        return file


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{uuid.uuid4().hex}"


class FileUpload:
    """A file that is being uploaded. Leaving `with` removes it unless `finish` was called."""

    def __init__(self, store: FileStore, owner: Owner) -> None:
        """Raises StorageError."""
        self.file_id = new_file_id()
        self._store = store
        self._owner = owner
        self._num_bytes = 0
        self._path = store.path_of(self.file_id).with_suffix(".part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with storage_errors():
            # Unbuffered, so that a full disk fails `write`, and not the close after it.
            self._file = FileIO(os.open(self._path, flags, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Append bytes. Raises BodyTooLongError, InvalidRequestError, StorageError."""
        most = self._store.max_file_bytes
        if self._num_bytes + len(data) > most:
            raise BodyTooLongError(f"the file is longer than {most} bytes; send less in one file")
        self._store.check_room(self._owner, len(data) + _OVERHEAD_BYTES)
        self._store.count(self._owner, len(data))
        self._num_bytes += len(data)
        rest = memoryview(data)
        with storage_errors():
            while rest:  # an almost full disk takes a part
                rest = rest[self._file.write(rest) :]

    def finish(self, filename: str, purpose: str) -> StoredFile:
        """Make the file findable. Raises StorageError."""
        with storage_errors():
            self._file.close()
            return self._store.add(self._owner, self._path, self.file_id, filename, purpose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A finished file has been counted by `add`.
        self._store.count(self._owner, -self._num_bytes)
        self._file.close()
        self._path.unlink(missing_ok=True)
