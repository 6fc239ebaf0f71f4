"""A checkpoint's weights: one or several safetensors files, read tensor by tensor.

The files are memory-mapped and the pages that were read are given back every few MiB, so reading a
model needs hardly more memory than the model. Refuses pickles. Knows no model; `models.loader` says
which tensor goes where.
"""

from collections.abc import Iterator, Set
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError
from quire.models.model_files import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Mapped pages stay resident until the file is closed, so it is reopened after so much was read.
RELEASE_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class _MappedFile:
    """An open safetensors file. Invariant: at most RELEASE_BYTES of its pages are resident, plus
    one chunk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read_bytes = 0
        self._handle = self._open()
        self.names: list[str] = list(self._handle.keys())

    def _open(self) -> Any:
        try:
            return safe_open(self._path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{self._path} does not exist; fetch it again") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._path} is not a whole safetensors file: {error}; fetch it again"
            ) from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def chunks(self, name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """The tensor in slices of its first dimension, each valid until the next is asked for."""
        stored = self._handle.get_slice(name)
        num_rows, *rest = stored.get_shape()
        item_bytes = _FLOAT_BYTES.get(stored.get_dtype())
        if item_bytes is None:
            raise CheckpointError(
                f"{self._path}: {name} is stored as {stored.get_dtype()}, but only "
                f"{', '.join(_FLOAT_BYTES)} can be read; convert the checkpoint to one of them"
            )
        row_bytes = item_bytes * prod(rest)
        num_rows_at_once = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for start in range(0, num_rows, num_rows_at_once):
            rows = slice(start, min(start + num_rows_at_once, num_rows))
            yield rows, self._handle.get_slice(name)[rows]
            self._count_bytes(row_bytes * num_rows_at_once)

    def _count_bytes(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        if self._num_read_bytes > RELEASE_BYTES:
            self.release()

    def release(self) -> None:
        """Give back the pages that were read."""
        self._handle = self._open()
        self._num_read_bytes = 0


class Checkpoint:
    """The weights of a model folder by name."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError that names the file at fault."""
        self._files: dict[str, _MappedFile] = {}
        self._last_read: _MappedFile | None = None
        for path in _weight_files(folder):
            file = _MappedFile(path)
            for name in file.names:
                if name in self._files:
                    raise CheckpointError(f"{folder}: two files hold the tensor {name}")
                self._files[name] = file

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, of the tensor's shape, converting to its dtype and device."""
        file = self._files[name]
        if self._last_read is not None and self._last_read is not file:
            self._last_read.release()  # or each shard would keep the last of its pages
        self._last_read = file
        for rows, chunk in file.chunks(name):
            target[rows].copy_(chunk)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same numbers."""
        if self.shape(first) != self.shape(second):
            return False
        pairs = zip(
            self._files[first].chunks(first), self._files[second].chunks(second), strict=True
        )
        return all(torch.equal(mine.float(), other.float()) for (_, mine), (_, other) in pairs)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        return _sharded_files(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name one in Hugging Face's format")
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as pickles ({', '.join(pickles[:3])}), which can run "
            "any code when they are read, so quire never does. Convert them once: load the folder "
            "in transformers and call model.save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise CheckpointError(
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    )


def _sharded_files(folder: Path) -> list[Path]:
    path = folder / INDEX_FILE
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files; fetch it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not in its folder")
    return [folder / name for name in names]
