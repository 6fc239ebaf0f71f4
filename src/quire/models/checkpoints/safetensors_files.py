"""Reads weights from safetensors files, in pieces of a few MiB.

A checkpoint is one or several files. They are memory-mapped, and the pages of each piece are
released after use, so reading needs hardly more memory than the model itself. Pickles are refused.
"""

import errno
import mmap
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path

import torch

from quire.errors import CheckpointError
from quire.hub.model_files import shown_name
from quire.hub.safetensors_header import read_header
from quire.hub.weight_files import INDEX_FILE, SINGLE_FILE, read_weight_map, weight_paths
from quire.models.checkpoints.source import CheckpointSource

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_CODES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes that only quantized weights have, for codes and scales."""


class _MappedFile:
    """An open safetensors file. Its pages are in memory only while data from `rows` are in use."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self._path = path
        try:
            self.tensors = read_header(path)
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; the download is not whole: fetch it again"
            ) from None
        except OSError as error:
            if error.errno == errno.ENOMEM:  # the address space is too small for the mapping
                raise MemoryError(str(error)) from error
            raise CheckpointError(
                f"{path} is not a whole safetensors file: {error.strerror}; fetch it again"
            ) from error

    @property
    def name(self) -> str:
        """The file's name."""
        return self._path.name

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype. Raises CheckpointError if it is not a float of 16, 32 or 64 bits."""
        stored = self.tensors[name].dtype
        if stored not in _DTYPES:
            raise CheckpointError(
                f"{self._path}: {shown_name(name)} is stored as {stored}, but only "
                f"{', '.join(_DTYPES)} can be read; name the original checkpoint, before it was "
                "quantized, or convert this one"
            )
        return _DTYPES[stored]

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The tensor's dtype, also for codes of quantized weights; None if it can't be read."""
        stored = self.tensors[name].dtype
        return _DTYPES.get(stored) or _CODES.get(stored)

    @contextmanager
    def rows(self, name: str, span: range, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yields rows of the tensor until the end of the `with`. `dtype` is its stored dtype."""
        stored = self.tensors[name]
        row_size = prod(stored.shape[1:])
        start = stored.start + span.start * row_size * dtype.itemsize
        num_bytes = len(span) * row_size * dtype.itemsize
        if num_bytes == 0:
            yield torch.empty(len(span), *stored.shape[1:], dtype=dtype)
            return
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=num_bytes, offset=start)
        if start % dtype.itemsize:
            raw = raw.clone()  # the copy is aligned
        yield raw.view(dtype).view(len(span), *stored.shape[1:])
        self._release(start, num_bytes)

    def _release(self, start: int, num_bytes: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._bytes.madvise(mmap.MADV_DONTNEED, begin, start + num_bytes - begin)


class SafetensorsFiles(CheckpointSource):
    """The tensors of one safetensors file, or of several files with an index."""

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE))

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, _MappedFile] = {}
        repeated: dict[str, list[_MappedFile]] = {}
        for path in weight_paths(folder):
            file = _MappedFile(path)
            for name in file.tensors:
                first = self._files.setdefault(name, file)
                if first is not file:
                    repeated.setdefault(name, [first]).append(file)
        if repeated:
            self._choose_files(folder, repeated)

    def _choose_files(self, folder: Path, repeated: Mapping[str, Sequence[_MappedFile]]) -> None:
        """For each tensor that several files hold, choose the file that the index names. Raises
        CheckpointError if the index names none of these files."""
        weight_map = read_weight_map(folder / INDEX_FILE)
        for name, files in repeated.items():
            chosen = [file for file in files if file.name == weight_map.get(name)]
            if not chosen:
                raise CheckpointError(
                    f"{folder}: {' and '.join(file.name for file in files)} hold a tensor"
                    f" {shown_name(name)}, and {INDEX_FILE} names neither for it; fetch it again"
                )
            (self._files[name],) = chosen

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].dtype(name)

    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Yields rows in their stored dtype."""
        return self._files[name].rows(name, span, self.dtype(name))

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The tensor's dtype, also for codes of quantized weights; None if it can't be read."""
        return self._files[name].stored_dtype(name)

    def stored_rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Yields rows of a tensor with any `stored_dtype`, for the readers of quantized weights."""
        dtype = self.stored_dtype(name)
        assert dtype is not None, name
        return self._files[name].rows(name, span, dtype)
