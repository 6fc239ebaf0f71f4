"""The interface of a checkpoint: named tensors, read in pieces.

A piece is some rows of a tensor, a few MiB at a time. One class for each format of files, listed in
`readers.py`. A source knows no model: `loader.py` says which tensor goes where.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, shown
from quire.formats.codes import CodedRows, Coding
from quire.hub.model_files import read_json_object, shown_name
from quire.models.config_bounds import MAX_EXPERTS

# Large enough to make the work between pieces vanish, small enough to be nothing beside a model.
_CHUNK_BYTES = 4 << 20
# A piece has whole panels of a packed weight, of which two threads would else write one.
_CHUNK_ROWS = 64


class CheckpointSource(ABC):
    """The weights of a model folder. Threads may share it."""

    @classmethod
    @abstractmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether the folder's weights are in this format, by the names of its files."""

    @classmethod
    def read_config(cls, folder: Path) -> dict[str, Any]:
        """The fields of the model's config, named as in config.json, which most formats leave
        beside the weights; one that holds them itself translates them here. Reads no weights.

        Raises CheckpointError.
        """
        return read_json_object(folder / "config.json")

    @classmethod
    def quantized_by(cls, folder: Path) -> str | None:
        """How the files themselves say that weights are quantized, for messages; None: the config
        tells, if they are. Reads no weights. Raises CheckpointError."""
        return None

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Reads what tensors there are. Raises CheckpointError that names the file at fault."""

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """Of all tensors, in the order in which they lie in the files."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor, as Hugging Face's checkpoints have it: a weight is [outputs, inputs]."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Of the rows that are lent. Raises CheckpointError for one that can't be read."""

    @abstractmethod
    def rows(self, name: str, span: range) -> AbstractContextManager[torch.Tensor]:
        """Lends rows of the tensor [len(span), ...], valid until the end of the `with`.

        Should leave no more memory behind than it found: a model is read in as many calls as it
        has pieces. Raises CheckpointError.
        """

    def coding(self, name: str) -> Coding | None:
        """How the tensor [outputs, inputs] is coded; None: it is not, or nothing but its numbers
        can be had. `rows` lends the numbers of a coded one, too."""
        return None

    def stored_as(self, name: str) -> str | None:
        """What the numbers that `rows` lends are made of, such as fp8; None: they are stored."""
        coding = self.coding(name)
        return None if coding is None else coding.name

    def coded_rows(self, name: str, span: range) -> AbstractContextManager[CodedRows]:
        """Lends rows of a tensor that has a `coding`, as `rows` does. Raises CheckpointError."""
        raise NotImplementedError

    def pieces(self, name: str) -> list[range]:
        """The tensor's rows in pieces of a few MiB. Raises CheckpointError for a dtype that can't
        be read."""
        shape = self.shape(name)
        num_rows = _CHUNK_BYTES // max(1, self.row_bytes(name))
        num_rows = max(1, num_rows // _CHUNK_ROWS * _CHUNK_ROWS or num_rows)
        end = shape[0] if shape else 1  # a single number is one row
        return [range(start, min(start + num_rows, end)) for start in range(0, end, num_rows)]

    def row_bytes(self, name: str) -> int:
        """Of the tensor's rows, about as they are stored. Raises CheckpointError for a dtype that
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


def check_num_experts(name: str, count: int) -> None:
    """Raises CheckpointError for a stacked tensor of more experts than any model has, before
    anything is made for each of them. name: the tensor's."""
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"the weights' tensor {shown_name(name)} is of {count} experts, but at most"
            f" {MAX_EXPERTS} can be; fetch it again"
        )


def refusal_of_two(first: str, second: str, name: str) -> CheckpointError:
    """first, second: tensors of the files, both of which would be the model's `name`."""
    return CheckpointError(
        f"the weights have {shown(first)} and {shown(second)}, either of which would be the "
        f"model's {shown(name)}; leave one of them out"
    )
