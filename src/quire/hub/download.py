"""Downloads large files from the hub into its client's cache and resumes partial downloads.

    blobs/ETAG.incomplete    the bytes received so far; a later call appends to it
    blobs/ETAG               the whole file; the client links it into the snapshot's folder

Since version 1.0, the hub's client (huggingface_hub) deletes partial files when its process ends.
This module keeps partial files, so that a later process can resume a download. Called by
`fetching`.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from threading import Event
from typing import BinaryIO, cast

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers
from tqdm import tqdm

from quire.errors import CheckpointError

OnBytes = Callable[[int, int], None]
"""Called with (bytes present, bytes in total) by the thread that waits for the downloads."""

MAX_FILES_AT_ONCE = 4
"""The number of simultaneous downloads; one connection seldom uses the whole bandwidth."""

SPARE_BYTES = 64 << 20
"""The bytes of disk space that a download must leave free."""

_REPORT_S = 0.1
_SHA256_DIGITS = 64
_HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file of the hub that is not in the cache."""

    name: str
    url: str
    etag: str
    size: int
    #: The path of the bytes received so far.
    partial: Path
    #: The path of the whole file.
    blob: Path

    @property
    def num_present_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0


def missing_files(snapshot: Path, names: Sequence[str]) -> list[str]:
    """The names of the files that the snapshot's folder lacks."""
    return [name for name in names if not (snapshot / name).exists()]


def fetch_files(repo: str, snapshot: Path, names: Sequence[str], on_bytes: OnBytes | None) -> None:
    """Fetch the files that the folder of a snapshot lacks.

    `repo` is the hub's id. `snapshot` is `.../snapshots/COMMIT`, as created by the hub's client.
    If on_bytes is None, a progress bar is drawn on stderr when that is a terminal.
    Raises CheckpointError, the errors of the hub's client, and OSError.
    """
    missing = missing_files(snapshot, names)
    files = [_look_up(repo, snapshot, name) for name in missing]
    needed = [file for file in files if not file.blob.exists()]
    _check_disk(repo, snapshot, needed)
    if needed:
        with _FetchProgress(repo, needed, on_bytes) as progress:
            progress.report()
            _fetch_all(needed, progress)
    for name in missing:
        hf_hub_download(repo, name, revision=snapshot.name)  # links the file that now exists


def _look_up(repo: str, snapshot: Path, name: str) -> _RemoteFile:
    url = hf_hub_url(repo, name, revision=snapshot.name)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        raise CheckpointError(
            f"{repo}: the hub does not report the size or the version of {name}; fetch it with `hf"
            f" download {repo} --local-dir FOLDER`, and name that folder"
        )
    blobs = snapshot.parent.parent / "blobs"
    blob = blobs / found.etag
    return _RemoteFile(name, url, found.etag, found.size, blobs / f"{found.etag}.incomplete", blob)


def _check_disk(repo: str, snapshot: Path, files: Sequence[_RemoteFile]) -> None:
    """Raises CheckpointError if the disk has no space for the bytes that are still missing."""
    needed = sum(max(0, file.size - file.num_present_bytes) for file in files)
    free = shutil.disk_usage(snapshot).free
    if needed and needed + SPARE_BYTES > free:
        raise CheckpointError(
            f"{repo} needs {needed} bytes more on the disk of {snapshot.parent.parent}, but only"
            f" {free} are free; free some of it, or set HF_HOME to a folder on another disk"
        )


def _fetch_all(files: Sequence[_RemoteFile], progress: "_FetchProgress") -> None:
    """Fetch several files at once; an error in one of them, or a Ctrl-C, stops the others."""
    with ThreadPoolExecutor(MAX_FILES_AT_ONCE, thread_name_prefix="fetch") as threads:
        pending = {threads.submit(_fetch, file, progress) for file in files}
        try:
            while pending:
                ended, pending = wait(pending, _REPORT_S, FIRST_EXCEPTION)
                progress.report()
                for future in ended:
                    future.result()
        except BaseException:
            progress.stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(file: _RemoteFile, progress: "_FetchProgress") -> None:
    """Fetch the rest of a file. Waits while another process fetches it."""
    storage = file.blob.parent.parent
    lock = storage.parent / ".locks" / storage.name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    file.partial.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if file.blob.exists():
            progress.present[file.name] = file.size
            return
        num_present = file.num_present_bytes
        # A partial file that is longer than the whole one is corrupt.
        if num_present > file.size:
            file.partial.unlink()
            num_present = 0
        file.partial.touch()
        with file.partial.open("r+b") as opened:
            opened.seek(num_present)
            counted = _CountedFile(opened, file.name, progress)
            http_get(
                file.url,
                cast(BinaryIO, counted),
                resume_size=num_present,
                headers=build_hf_headers(),
                expected_size=file.size,
                _tqdm_bar=tqdm(disable=True),  # our own bar counts all files together
            )
        if num_present:
            _check_hash(file)
        os.replace(file.partial, file.blob)


def _check_hash(file: _RemoteFile) -> None:
    """Check the hash of a resumed file. If the hub stores it as a large file, its ETag is its
    SHA-256; otherwise nothing can be checked."""
    if len(file.etag) != _SHA256_DIGITS:
        return
    digest = hashlib.sha256()
    with file.partial.open("rb") as opened:
        while chunk := opened.read(_HASHED_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.etag:
        file.partial.unlink()
        raise CheckpointError(
            f"{file.name}: the part downloaded earlier and the part downloaded now don't match, so"
            " both were deleted; try again"
        )


class _StoppedError(Exception):
    """Raised to stop a download because another download failed or the user interrupted it."""


class _CountedFile:
    """The file to which the hub's client writes. It counts the bytes, and raises once stopped."""

    def __init__(self, file: BufferedRandom, name: str, progress: "_FetchProgress") -> None:
        self._file, self._name, self._progress = file, name, progress
        progress.present[name] = file.tell()

    def write(self, chunk: bytes) -> int:
        if self._progress.stop.is_set():
            raise _StoppedError
        num_bytes = self._file.write(chunk)
        self._progress.present[self._name] = self._file.tell()
        return num_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)


class _FetchProgress:
    """Counts the bytes on disk of all files together. Used as a context manager."""

    def __init__(self, repo: str, files: Sequence[_RemoteFile], on_bytes: OnBytes | None) -> None:
        #: Set to end all downloads.
        self.stop = Event()
        #: Number of bytes on disk, by file name. Each entry is written by one thread only.
        self.present = {file.name: file.num_present_bytes for file in files}
        self._total = sum(file.size for file in files)
        self._on_bytes = on_bytes
        self._bar = tqdm(
            desc=repo,
            total=self._total,
            initial=sum(self.present.values()),
            unit="B",
            unit_scale=True,
            disable=None if on_bytes is None else True,
        )

    def __enter__(self) -> "_FetchProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def report(self) -> None:
        done = sum(self.present.values())
        if self._on_bytes is not None:
            self._on_bytes(done, self._total)
        self._bar.update(done - self._bar.n)
