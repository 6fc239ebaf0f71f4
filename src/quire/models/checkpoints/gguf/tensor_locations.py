"""Where the tensors of a Hugging Face checkpoint are stored in GGUF files.

Made by `tensor_map`, used by `gguf_files`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch

from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.hub.gguf.header import TensorInfo
from quire.models.checkpoints.gguf.decoding import (
    BlockRows,
    block_format_of,
    numbers,
    plain_dtype,
)
from quire.models.checkpoints.gguf.gguf_model import GGUFModel


class TensorLocation(ABC):
    """Where a checkpoint's tensor is stored in the GGUF files, and how its rows are read."""

    #: The tensor's shape in Hugging Face's checkpoints.
    shape: tuple[int, ...]

    @abstractmethod
    def dtype(self, model: GGUFModel) -> torch.dtype:
        """The dtype of the rows that `lend` yields."""

    @abstractmethod
    def lend(self, model: GGUFModel, span: range) -> "Iterator[torch.Tensor]":
        """Yields the rows `span`. Callers wrap this generator in `contextmanager`."""

    def block_format(self, model: GGUFModel) -> BlockFormat | None:
        """See `CheckpointSource.block_format`."""
        return None

    @property
    @abstractmethod
    def source(self) -> str:
        """The name of the stored tensor from which this tensor is made (the first, if several)."""

    def stored_as(self, model: GGUFModel) -> str | None:
        """See `CheckpointSource.stored_as`. None for vectors, which don't need much memory."""
        storage = model.info(self.source).storage
        is_plain = plain_dtype(storage) is not None or len(self.shape) < 2
        return None if is_plain else storage.name


@dataclass(frozen=True, slots=True)
class StoredRows(TensorLocation):
    """A tensor whose rows are rows of one stored tensor."""

    #: The stored tensor's name.
    name: str
    shape: tuple[int, ...]
    #: The row of the stored tensor that is the tensor's first row. Leading dimensions are
    #: flattened: expert 2 of a stored tensor [experts, 64, inputs] starts at row 128.
    start: int = 0
    #: The stored index of each row, counted from `start`; None if rows are in order.
    order: torch.Tensor | None = None
    #: The index of the input of each stored column of a matrix; None if columns are in order.
    inputs: torch.Tensor | None = None

    @property
    def source(self) -> str:
        return self.name

    def dtype(self, model: GGUFModel) -> torch.dtype:
        return plain_dtype(model.info(self.name).storage) or torch.float32

    def block_format(self, model: GGUFModel) -> BlockFormat | None:
        storage = model.info(self.name).storage
        is_matrix = len(self.shape) == 2 and self.shape[1] % storage.block_size == 0
        return block_format_of(storage, self.inputs) if is_matrix else None

    def lend(self, model: GGUFModel, span: range) -> Iterator[torch.Tensor]:
        info = model.info(self.name)
        # Columns are reordered after dequantization, since a block holds several columns.
        if self.inputs is not None:
            with contextmanager(replace(self, inputs=None).lend)(model, span) as rows:
                yield torch.empty_like(rows).index_copy_(1, self.inputs, rows)
            return
        row_size = prod(self.shape[1:])
        shape = (len(span), *self.shape[1:])
        if row_size % info.storage.block_size:  # rows don't begin where blocks do
            whole = model.numbers(self.name).view(-1, row_size)
            yield whole[self._wanted(span)].view(shape)
            return
        with self.lent_bytes(model, span) as raw:
            dtype = plain_dtype(info.storage)
            if dtype is None:
                yield numbers(info.storage, raw).view(shape)
            else:
                yield _viewed(raw, dtype).view(shape)

    @contextmanager
    def lent_quantized(self, model: GGUFModel, span: range) -> Iterator[BlockQuantizedRows]:
        """Yields rows of a tensor that has a block format."""
        with self.lent_bytes(model, span) as raw:
            yield BlockRows(model.info(self.name).storage, raw, self.inputs)

    @contextmanager
    def lent_bytes(self, model: GGUFModel, span: range) -> Iterator[torch.Tensor]:
        """Yields the bytes of rows, [len(span), bytes of a row] uint8. Each row must begin at a
        block."""
        row_bytes = _row_bytes(model.info(self.name), self.shape)
        if self.order is None:
            start = (self.start + span.start) * row_bytes
            with model.raw(self.name, start, len(span) * row_bytes) as raw:
                yield raw.view(len(span), row_bytes)
            return
        wanted = self._wanted(span)
        first = int(wanted.min())
        count = int(wanted.max()) + 1 - first
        with model.raw(self.name, first * row_bytes, count * row_bytes) as raw:
            yield raw.view(count, row_bytes)[wanted - first]

    def _wanted(self, span: range) -> torch.Tensor:
        """The indices of the rows `span` in the stored tensor."""
        if self.order is None:
            return torch.arange(span.start, span.stop) + self.start
        return self.order[span.start : span.stop] + self.start


@dataclass(frozen=True, slots=True)
class Combined:
    """The rule for a tensor that is computed from several stored tensors. These must have the same
    first dimension."""

    #: Names of the stored tensors within a layer.
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    #: Number of rows that are computed from each entry along the first dimension.
    num_rows: int
    #: Computes rows [n, num_rows, ...] from n entries of each stored tensor.
    compute: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class CombinedStacks(TensorLocation):
    """The location of a `Combined` tensor in one layer."""

    shape: tuple[int, ...]
    #: Names of the stored tensors.
    names: tuple[str, ...]
    num_rows: int
    compute: Callable[..., torch.Tensor]

    @property
    def source(self) -> str:
        return self.names[0]

    def dtype(self, model: GGUFModel) -> torch.dtype:
        return torch.float32

    def lend(self, model: GGUFModel, span: range) -> Iterator[torch.Tensor]:
        first, end = span.start // self.num_rows, -(-span.stop // self.num_rows)
        stacks = [model.stacks(name, range(first, end)) for name in self.names]
        rows = self.compute(*stacks).reshape(-1, *self.shape[1:])
        start = span.start - first * self.num_rows
        yield rows[start : start + len(span)]


@dataclass(frozen=True, slots=True)
class Computed(TensorLocation):
    """A tensor that is computed from a whole stored tensor."""

    shape: tuple[int, ...]
    #: The stored tensor's name.
    name: str
    #: Reads the stored tensor and returns the result in fp32.
    compute: Callable[[], torch.Tensor]

    @property
    def source(self) -> str:
        return self.name

    def dtype(self, model: GGUFModel) -> torch.dtype:
        return torch.float32

    def lend(self, model: GGUFModel, span: range) -> Iterator[torch.Tensor]:
        whole = self.compute().view(self.shape or (1,))  # a single number is one row
        yield whole[span.start : span.stop]


def _row_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) // info.storage.block_size * info.storage.block_bytes


def _viewed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # the copy is aligned
    return raw.view(dtype)
