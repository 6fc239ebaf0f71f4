"""An open GGUF model: its metadata, and its tensors as bytes or fp32 values.

It reads the format's own fields, and joins the files of one model. The modules in `families`
interpret the fields of an architecture. Called by `gguf_files` and `families`.
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.hub.gguf.header import GGUFFile, TensorInfo, broken, read_gguf
from quire.hub.gguf.naming import gguf_paths
from quire.hub.gguf.values import Value, shortest_decimal
from quire.hub.model_files import shown_name
from quire.models.checkpoints.gguf.decoding import numbers

_MAX_SMALL_NUMBERS = 1 << 20
"""Maximum number of values of a tensor from which a config is made."""
_KINDS = {"adapter": "an adapter", "mmproj": "an image encoder", "imatrix": "a quantizer's notes"}


_CAUSAL = "attention.causal"
"""A field that may be ignored only if it is true."""
_POOLING = "pooling_type"
_POOLING_TYPES = (0, 1, 2, 3)
"""Pooling types that are read: none, mean, first token, last token. Models with other types have a
scoring head."""


class GGUFModel:
    """The metadata and tensors of a model in one or several GGUF files. Threads may share it.

    Reading a field of the architecture marks it as understood, and `finish` refuses unread fields.
    """

    def __init__(self, path: Path, kind: str = "model") -> None:
        """`path` is a file or folder, see `hub.gguf.naming.gguf_paths`. `kind` is the expected
        general.type. Raises CheckpointError."""
        files = [read_gguf(each) for each in gguf_paths(path)]
        self.path = files[0].path
        self.metadata: Mapping[str, Value] = files[0].metadata
        self._files: dict[str, GGUFFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._files:
                    raise CheckpointError(
                        f"{file.path}: the tensor {shown_name(name)} is in "
                        f"{self._files[name].path.name} as well; fetch the model again"
                    )
                self._files[name] = file
        _check_split(files, len(self._files))
        self._read: set[str] = set()
        self.architecture = self._architecture(kind)

    def _architecture(self, expected: str) -> str:
        kind = _single(self.path, self.metadata, "general.type", expected)
        if kind != expected:
            what = _KINDS.get(str(kind), shown(kind))
            raise UnsupportedModelError(f"{self.path} holds {what}, not a model; name the model's")
        name = _single(self.path, self.metadata, "general.architecture", None)
        if not isinstance(name, str):
            raise broken(self.path, f"general.architecture is {shown(name)}")
        return name

    @property
    def tensors(self) -> Mapping[str, GGUFFile]:
        """Maps each tensor's name to its file, in the order of the files."""
        return self._files

    def info(self, name: str) -> TensorInfo:
        """The type, shape and position of an existing tensor."""
        return self._files[name].tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises CheckpointError if the tensor is missing."""
        if name not in self._files:
            raise broken(self.path, f"it has no tensor {shown_name(name)}")
        return self.info(name).shape

    @contextmanager
    def raw(self, name: str, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Yields `num_bytes` bytes of a tensor, from its byte `start` on."""
        file = self._files[name]
        begin = file.tensors[name].start + start
        yield torch.frombuffer(file.content, dtype=torch.uint8, count=num_bytes, offset=begin)
        if hasattr(mmap, "MADV_DONTNEED"):
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            file.content.madvise(mmap.MADV_DONTNEED, page, begin + num_bytes - page)

    def numbers(self, name: str) -> torch.Tensor:
        """The whole tensor, in fp32."""
        info = self.info(name)
        with self.raw(name, 0, info.num_bytes) as raw:
            return numbers(info.storage, raw.view(-1, info.row_bytes)).view(info.shape)

    def stacks(self, name: str, span: range) -> torch.Tensor:
        """Entries `span` along the first dimension, in fp32. The tensor has several dimensions."""
        info = self.info(name)
        rows_of_one = prod(info.shape[1:-1])
        start, end = (at * rows_of_one * info.row_bytes for at in (span.start, span.stop))
        with self.raw(name, start, end - start) as raw:
            found = numbers(info.storage, raw.view(-1, info.row_bytes))
        return found.view(len(span), *info.shape[1:])

    def small_numbers(self, name: str) -> list[float]:
        """The values of a small tensor that describes the model; empty if it doesn't exist."""
        if name not in self._files:
            return []
        count = prod(self.info(name).shape)
        if count > _MAX_SMALL_NUMBERS:
            raise broken(self.path, f"its tensor {shown_name(name)} has {count} numbers")
        return [shortest_decimal(each) for each in self.numbers(name).flatten().tolist()]

    def integer(self, field: str, default: int | None = None) -> int:
        """The value of an integer field of the architecture, such as "block_count".

        If the field is a list, its entries must be equal. Without a default, the field must exist.
        """
        found = self._value(field, default)
        if isinstance(found, np.ndarray) and found.size:
            if (found != found.flat[0]).any():
                raise UnsupportedModelError(
                    f"{self.path}: {self._name(field)} differs from layer to layer, which quire"
                    f" does not support for the architecture {shown_name(self.architecture)}"
                )
            found = found.flat[0].item()
        if type(found) is not int or found < 0:
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a count")
        return found

    def num_layers(self) -> int:
        """Number of layers. Raises CheckpointError if it exceeds the number of tensors."""
        count = self.integer("block_count")
        if not 0 < count <= len(self._files):
            raise broken(
                self.path, f"it would have {count} layers, but has {len(self._files)} tensors"
            )
        return count

    def integers(self, field: str, default: int | None = None) -> list[int]:
        """The values of an integer field, one per layer. The file may hold one for all layers."""
        found = self._value(field, default)
        num_layers = self.num_layers()
        if not isinstance(found, np.ndarray):
            return [self.integer(field, default)] * num_layers
        if found.dtype.kind not in "iub" or found.ndim != 1 or len(found) < num_layers:
            raise broken(
                self.path, f"{self._name(field)} must be a list of {num_layers} whole numbers"
            )
        return [int(each) for each in found[:num_layers]]

    def number(self, field: str, default: float | None = None) -> float:
        """The value of a float field. An fp32 value becomes the shortest decimal number that rounds
        to it: 1e-05, not 9.99999974e-06."""
        found = self._value(field, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a number")
        return shortest_decimal(float(found))

    def text(self, field: str, default: str) -> str:
        """A string field."""
        found = self._value(field, default)
        if not isinstance(found, str):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a text")
        return found

    def flag(self, field: str, default: bool) -> bool:
        """A boolean field."""
        found = self._value(field, default)
        if not isinstance(found, bool):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not true or false")
        return found

    def has(self, field: str) -> bool:
        """Whether the architecture's field exists."""
        return self._name(field) in self.metadata

    def skip(self, *fields: str) -> None:
        """Mark fields as read, because their values are redundant."""
        self._read.update(map(self._name, fields))

    def finish(self) -> None:
        """Raises UnsupportedModelError if a field of the architecture was not read, and its value
        is not 0, false or empty: such a field may change what the model computes."""
        if _single(self.path, self.metadata, self._name(_POOLING), 0) in _POOLING_TYPES:
            self.skip(_POOLING)  # `models.pooling_config` reads it
        if _single(self.path, self.metadata, self._name(_CAUSAL), True) is True:
            self.skip(_CAUSAL)
        for name, value in self.metadata.items():
            if not name.startswith(f"{self.architecture}.") or name in self._read:
                continue
            is_plain = isinstance(value, bool | int | float | str)
            if is_plain and not value and name != self._name(_CAUSAL):
                continue
            raise UnsupportedModelError(
                f"{self.path}: the metadata field {shown_name(name)} is "
                f"{shown(value) if is_plain else 'a list'}, which quire does not understand and "
                "which may change the model's results"
            )

    def _name(self, field: str) -> str:
        return f"{self.architecture}.{field}"

    def _value(self, field: str, default: Any) -> Any:
        name = self._name(field)
        self._read.add(name)
        found = self.metadata.get(name, default)
        if found is None:
            raise broken(self.path, f"it has no metadata field {shown_name(name)}")
        return found


def _single(path: Path, metadata: Mapping[str, Value], name: str, default: Any) -> Any:
    """The metadata field `name`, or the default. Raises CheckpointError if it is a list."""
    found = metadata.get(name, default)
    if found is not None and not isinstance(found, bool | int | float | str):
        raise broken(path, f"{name} is a list")
    return found


def _check_split(files: list[GGUFFile], num_tensors: int) -> None:
    """Raises CheckpointError if the files' metadata contradicts their names or the tensors."""
    for index, file in enumerate(files):
        count, number = (
            _single(file.path, file.metadata, f"split.{name}", 0) for name in ("count", "no")
        )
        if (count, number) != (len(files), index) and (count or len(files) > 1):
            raise CheckpointError(
                f"{file.path} says that it is file {shown(number)} of {shown(count)}, counted from "
                f"0, but by its name it is file {index} of {len(files)}; give the files their "
                "names back, or fetch them again"
            )
    first = files[0]
    total = _single(first.path, first.metadata, "split.tensors.count", num_tensors)
    if total != num_tensors:
        raise CheckpointError(
            f"{first.path}: the model has {shown(total)} tensors, but {num_tensors} are in its "
            f"{len(files)} files; fetch it again"
        )
