"""Selects the rows of a checkpoint's tensor that make up one parameter of the model.

`Arrangement.selected` uses these selections for parts of fused tensors whose rows alternate, and
for parts that are transposed. Called by `arranged.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import torch

ReadRows = Callable[[range], AbstractContextManager[torch.Tensor]]
"""Reads rows of a tensor in the files, like `CheckpointSource.rows`."""

_MOST_READ_TOO_MUCH = 2
"""A range is read in one piece if it has at most this many rows for each wanted row."""


class RowSelection(ABC):
    """The part of a tensor in the files that makes up one parameter of the model."""

    @property
    @abstractmethod
    def num_source_rows(self) -> int:
        """Number of rows of the tensor in the files."""

    @abstractmethod
    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape. `source` is the shape of the tensor in the files."""

    @abstractmethod
    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        """Rows `span` of the parameter."""


@dataclass(frozen=True, slots=True)
class IndexedRows(RowSelection):
    """Some rows of a tensor, in any order."""

    #: For each row of the parameter, the row in the files, int64.
    rows: torch.Tensor
    num_source_rows: int

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.rows), *source[1:])

    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        return torch.cat([*_read(rows, self.rows[span.start : span.stop])])


def _read(rows: ReadRows, wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the wanted rows in pieces. A range with few wanted rows is halved recursively."""
    first, last = int(wanted.min()), int(wanted.max())
    if last - first < _MOST_READ_TOO_MUCH * len(wanted):
        with rows(range(first, last + 1)) as lent:
            yield lent[wanted - first]
        return
    for half in wanted.chunk(2):
        yield from _read(rows, half)


@dataclass(frozen=True, slots=True)
class TransposedRows(RowSelection):
    """The parameter [I, num_rows] that is the transpose of the rows [start, start + num_rows) of a
    tensor [num_source_rows, I]. For a vector, I is 1."""

    start: int
    num_rows: int
    num_source_rows: int

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(source[1:]), self.num_rows)

    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        with rows(range(self.start, self.start + self.num_rows)) as lent:
            return lent.view(self.num_rows, -1)[:, span.start : span.stop].T.contiguous()
