"""Fetches the headers of a hub's GGUF files, before the files themselves.

A header has the config, the tokenizer and the list of tensors, in the first few megabytes. It is
written into a sparse file with the name and size of the hub's file, so readers of headers can read
it like the whole file. The files lie in a folder that is deleted when the process ends. Called by
`hub.fetching`; imports the hub's client.
"""

import atexit
import errno
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

from huggingface_hub import hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers
from tqdm import tqdm

from quire.errors import CheckpointError
from quire.hub.gguf.header import read_gguf

FIRST_BYTES = 12 << 20
"""Bytes requested first of a model's first file: enough for 200,000 tokens and their merges."""
LATER_BYTES = 256 << 10
"""Bytes requested first of a model's later files, whose headers list only tensors."""
MOST_BYTES = 256 << 20
"""Maximum number of bytes fetched for one header."""
_GROWTH = 4


def fetch_headers(
    repo: str, commit: str, files: Mapping[str, int], *, first_bytes: int | None = None
) -> Path:
    """Fetch the headers of all `files`. Returns the path of the sparse copy of the first file.

    `files` maps the names of one model's files to their sizes in bytes. `first_bytes` are requested
    first of the first file; None means FIRST_BYTES.

    Raises CheckpointError for a file that is not GGUF and for a full disk, errors of the hub's
    client, and OSError.
    """
    folder = _folder(repo, commit)
    first = folder / next(iter(files))
    for name, size in files.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            url = hf_hub_url(repo, name, revision=commit)
            num_bytes = (first_bytes or FIRST_BYTES) if path == first else LATER_BYTES
            try:
                _fetch_header(url, size, num_bytes, path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise CheckpointError(
                    f"the header of {repo}'s {name} can't be stored in {tempfile.gettempdir()},"
                    " whose disk is full: free some of it, or set TMPDIR to a folder on"
                    " another disk"
                ) from error
    return first


@cache
def _folder(repo: str, commit: str) -> Path:
    """A folder for headers, which is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fetch_header(url: str, size: int, num_bytes: int, path: Path) -> None:
    """Fetch num_bytes of the file, then more until the whole header is there."""
    beginning = path.with_name(f"{path.name}.beginning")
    while True:
        num_bytes = min(num_bytes, size, MOST_BYTES)
        _fetch_beginning(url, num_bytes, beginning)
        with beginning.open("r+b") as file:
            file.truncate(size)
        is_last = num_bytes == min(size, MOST_BYTES)
        try:
            starts = [each.start for each in read_gguf(beginning).tensors.values()]
            if is_last or min(starts, default=0) <= num_bytes:
                break
        except CheckpointError as error:  # bytes not yet fetched are read as zeros
            if is_last:
                raise CheckpointError(str(error).replace(str(beginning), url)) from error
        num_bytes *= _GROWTH
    beginning.rename(path)


def _fetch_beginning(url: str, num_bytes: int, path: Path) -> None:
    with path.open("wb") as opened, suppress(_EnoughError):
        http_get(
            url,
            cast(BinaryIO, _FirstBytes(opened, num_bytes)),
            headers={**build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}"},
            _tqdm_bar=tqdm(disable=True),
        )


class _EnoughError(Exception):
    """Raised by `_FirstBytes` to stop a download, once all wanted bytes have arrived."""


class _FirstBytes:
    """A file that the hub's client writes to. It takes `num_bytes` bytes and then raises
    _EnoughError, so a hub that ignores the Range header can't send more."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def write(self, chunk: bytes) -> int:
        left = self._num_bytes - self._file.tell()
        self._file.write(chunk[:left])
        if len(chunk) >= left:
            raise _EnoughError
        return len(chunk)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)
