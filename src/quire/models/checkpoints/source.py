"""The interface of a checkpoint: named tensors, read in pieces.

A piece is a range of a tensor's rows, a few MiB in size. Methods that read rows return context
managers: the data are valid only inside the `with`. Each file format has a class, listed in
`file_formats.py`. A source depends on no model: `loader.py` decides which parameter a tensor fills.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, shown
from quire.formats.block_quantized.weights import BlockFormat, BlockQuantizedRows
from quire.hub.model_files import read_json_object, shown_name
from quire.models.config_bounds import MAX_EXPERTS

# The size of a piece: large enough to hide the work between pieces, small compared with a model.
_CHUNK_BYTES = 4 << 20
# Unless rows are large, a piece has a multiple of this number of rows. Then pieces consist of whole
# panels of packed weights, so that no two threads write the same panel.
_CHUNK_ROWS = 64


class CheckpointSource(ABC):
    """The weights of a model folder. Threads may share it."""

    @classmethod
    @abstractmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether the folder's weights are in this format, judged by the names of its files."""

    @classmethod
    def read_config(cls, folder: Path) -> dict[str, Any]:
        """The fields of the model's config, named as in config.json. Reads no weights.

        Formats that hold the config inside the weight files translate it here. Raises
        CheckpointError.
        """
        return read_json_object(folder / "config.json")

    @classmethod
    def quantized_by(cls, folder: Path) -> str | None:
        """The quantization that the weight files themselves declare, for messages; None if only
        config.json can declare it. Reads no weights. Raises CheckpointError."""
        return None

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Reads the list of tensors. Raises CheckpointError that names the file at fault."""

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """The names of all tensors, in the order of the files."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape as in Hugging Face's checkpoints: a weight is [outputs, inputs]."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensors that `rows` yields. Raises CheckpointError for a stored dtype
        that can't be read."""

    @abstractmethod
    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Yields rows of the tensor, [len(span), ...], in a `with`.

        Implementations should release the memory that a call used, since a model is read in
        many calls. Raises CheckpointError.
        """

    def block_format(self, name: str) -> BlockFormat | None:
        """The block format of a quantized tensor [outputs, inputs]; None if its rows can't be read
        as codes. `rows` always dequantizes."""
        return None

    def stored_as(self, name: str) -> str | None:
        """The name of the stored format, such as fp8, if `rows` must dequantize the tensor; None if
        it need not."""
        block_format = self.block_format(name)
        return None if block_format is None else block_format.name

    def quantized_rows(self, name: str, span: range) -> AbstractContextManager[BlockQuantizedRows]:
        """Yields rows of a tensor that has a `block_format`, as codes, in a `with`. Raises
        CheckpointError."""
        raise NotImplementedError

    def pieces(self, name: str) -> list[range]:
        """Split the tensor's rows into pieces of a few MiB. Raises CheckpointError for a dtype that
        can't be read."""
        shape = self.shape(name)
        num_rows = _CHUNK_BYTES // max(1, self.row_bytes(name))
        num_rows = max(1, num_rows // _CHUNK_ROWS * _CHUNK_ROWS or num_rows)
        end = shape[0] if shape else 1  # a single number is one row
        return [range(start, min(start + num_rows, end)) for start in range(0, end, num_rows)]

    def row_bytes(self, name: str) -> int:
        """Approximate number of bytes of a stored row. Raises CheckpointError for a dtype that
        can't be read."""
        return self.dtype(name).itemsize * prod(self.shape(name)[1:])

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same numbers."""
        if self.shape(first) != self.shape(second):
            return False
        return all(self._equal_rows(first, second, span) for span in self.pieces(first))

    def _equal_rows(self, first: str, second: str, span: range) -> bool:
        with self.rows(first, span) as mine, self.rows(second, span) as other:
            return torch.equal(mine.float(), other.float())


class DerivedSource(CheckpointSource):
    """Base of sources that wrap another source or exist only in memory, so are in no folder."""

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return False


class WrappedSource(DerivedSource):
    """Base of sources that present the tensors of another source."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source

    @property
    def names(self) -> Set[str]:
        return self._source.names

    def stored_name(self, name: str) -> str:
        """The name of the source's tensor from which the tensor `name` is made."""
        return name

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self.stored_name(name))

    def stored_as(self, name: str) -> str | None:
        return self._source.stored_as(self.stored_name(name))


def check_num_experts(name: str, count: int) -> None:
    """Raises CheckpointError if the stacked tensor `name` has more experts than any model.

    Callers check this before they allocate anything for each expert.
    """
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"the weights' tensor {shown_name(name)} has {count} experts, but at most {MAX_EXPERTS}"
            " are allowed; fetch it again"
        )


def refusal_of_two(first: str, second: str, name: str) -> CheckpointError:
    """The error for two tensors of the files that would both become the model's tensor `name`."""
    return CheckpointError(
        f"the weights have {shown(first)} and {shown(second)}, either of which would be the "
        f"model's {shown(name)}; leave one of them out"
    )
