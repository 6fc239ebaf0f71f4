"""An open GGUF model: its metadata, and its tensors' bytes and numbers.

Knows the format's own fields and how several files are one model; what an architecture's fields
mean is in `families`. Called by `gguf_files`, and by the translations of configs.
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
from quire.hub.gguf.values import Value
from quire.hub.model_files import shown_name
from quire.models.checkpoints.gguf.decoding import numbers

_MAX_SMALL_NUMBERS = 1 << 20
"""Of a tensor that is read whole for a config."""
_KINDS = {"adapter": "an adapter", "mmproj": "an image encoder", "imatrix": "a quantizer's notes"}


_CAUSAL = "attention.causal"
"""Says something where it is false."""
_POOLING = "pooling_type"
_POOLING_TYPES = (0, 1, 2, 3)
"""None, mean, first token, last token. Another is of a model with a head that scores."""


class GGUFModel:
    """Threads may share it."""

    def __init__(self, path: Path) -> None:
        """path: as `hub.gguf.naming.gguf_paths` takes it. Raises CheckpointError."""
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
        self.architecture = self._architecture()

    def _architecture(self) -> str:
        kind = _single(self.path, self.metadata, "general.type", "model")
        if kind != "model":
            what = _KINDS.get(str(kind), shown(kind))
            raise UnsupportedModelError(f"{self.path} holds {what}, not a model; name the model's")
        name = _single(self.path, self.metadata, "general.architecture", None)
        if not isinstance(name, str):
            raise broken(self.path, f"general.architecture is {shown(name)}")
        return name

    @property
    def tensors(self) -> Mapping[str, GGUFFile]:
        """The names of all tensors, in the files' order."""
        return self._files

    def info(self, name: str) -> TensorInfo:
        """Of a tensor that is there."""
        return self._files[name].tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if name not in self._files:
            raise broken(self.path, f"it has no tensor {shown_name(name)}")
        return self.info(name).shape

    @contextmanager
    def raw(self, name: str, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Lends bytes of a tensor, from its own byte `start` on."""
        file = self._files[name]
        begin = file.tensors[name].start + start
        yield torch.frombuffer(file.content, dtype=torch.uint8, count=num_bytes, offset=begin)
        if hasattr(mmap, "MADV_DONTNEED"):
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            file.content.madvise(mmap.MADV_DONTNEED, page, begin + num_bytes - page)

    def numbers(self, name: str) -> torch.Tensor:
        """All of a tensor, fp32."""
        info = self.info(name)
        with self.raw(name, 0, info.num_bytes) as raw:
            return numbers(info.storage, raw.view(-1, info.row_bytes)).view(info.shape)

    def stacks(self, name: str, span: range) -> torch.Tensor:
        """Entries of a tensor's first dimension, fp32, of a tensor with at least two."""
        info = self.info(name)
        rows_of_one = prod(info.shape[1:-1])
        start, end = (at * rows_of_one * info.row_bytes for at in (span.start, span.stop))
        with self.raw(name, start, end - start) as raw:
            found = numbers(info.storage, raw.view(-1, info.row_bytes))
        return found.view(len(span), *info.shape[1:])

    def small_numbers(self, name: str) -> list[float]:
        """Of a tensor that says something of the model; empty where it is not there."""
        if name not in self._files:
            return []
        count = prod(self.info(name).shape)
        if count > _MAX_SMALL_NUMBERS:
            raise broken(self.path, f"its tensor {shown_name(name)} has {count} numbers")
        return [_shortest(each) for each in self.numbers(name).flatten().tolist()]

    def integer(self, field: str, default: int | None = None) -> int:
        """A field of the architecture, such as "block_count"; where it is a list, its entries must
        be equal. default: where there is none; None: it must be there."""
        found = self._value(field, default)
        if isinstance(found, np.ndarray) and found.size:
            if (found != found.flat[0]).any():
                raise UnsupportedModelError(
                    f"{self.path}: {self._name(field)} differs from layer to layer, which quire's "
                    f"models of the architecture {shown_name(self.architecture)} don't"
                )
            found = found.flat[0].item()
        if type(found) is not int or found < 0:
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a count")
        return found

    def num_layers(self) -> int:
        """Each has tensors of its own."""
        count = self.integer("block_count")
        if not 0 < count <= len(self._files):
            raise broken(
                self.path, f"it would have {count} layers, but has {len(self._files)} tensors"
            )
        return count

    def integers(self, field: str, default: int | None = None) -> list[int]:
        """One for each layer; the field may be one number for all."""
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
        """Of fp32, the shortest that is rounded to the same: 1e-05, not 9.99999974e-06."""
        found = self._value(field, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a number")
        return _shortest(float(found))

    def text(self, field: str, default: str) -> str:
        """A field that is a word."""
        found = self._value(field, default)
        if not isinstance(found, str):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not a text")
        return found

    def flag(self, field: str, default: bool) -> bool:
        """A field that is true or false."""
        found = self._value(field, default)
        if not isinstance(found, bool):
            raise broken(self.path, f"{self._name(field)} is {shown(found)}, not true or false")
        return found

    def has(self, field: str) -> bool:
        """Whether the architecture's field is there."""
        return self._name(field) in self.metadata

    def skip(self, *fields: str) -> None:
        """Fields that say nothing that isn't known otherwise."""
        self._read.update(map(self._name, fields))

    def finish(self) -> None:
        """Raises UnsupportedModelError for a field of the architecture that was not read and says
        something: it may change what the model computes."""
        if _single(self.path, self.metadata, self._name(_POOLING), 0) in _POOLING_TYPES:
            self.skip(_POOLING)  # which `models.pooling_config` reads
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
    """A field that is no list."""
    found = metadata.get(name, default)
    if found is not None and not isinstance(found, bool | int | float | str):
        raise broken(path, f"{name} is a list")
    return found


def _shortest(number: float) -> float:
    single = np.float32(number)
    return float(str(single)) if float(single) == number else number


def _check_split(files: list[GGUFFile], num_tensors: int) -> None:
    """The files must say of themselves what their names say."""
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
