"""Which rows of a checkpoint's tensor one of a model's is made of.

For what `Arrangement.taken` names: parts that alternate, and heads that are stored transposed.
Called by `arranged.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import torch

ReadRows = Callable[[range], AbstractContextManager[torch.Tensor]]
"""Rows of a tensor in the files, lent as `CheckpointSource.rows` lends them."""

_MOST_READ_TOO_MUCH = 2
"""A range is read as a whole if at most so many times as many rows are read as are wanted."""


class Taken(ABC):
    """What one of our tensors takes of one in the files."""

    @property
    @abstractmethod
    def num_source_rows(self) -> int:
        """Of the tensor in the files."""

    @abstractmethod
    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """Of our tensor. source: the shape in the files, of so many rows."""

    @abstractmethod
    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        """Rows `span` of our tensor."""


@dataclass(frozen=True, slots=True)
class RowsOf(Taken):
    """Some rows, in any order. rows: the number of each of them in the files, int64."""

    rows: torch.Tensor
    num_source_rows: int

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.rows), *source[1:])

    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        return torch.cat([*_read(rows, self.rows[span.start : span.stop])])


def _read(rows: ReadRows, wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    """In pieces, so that not much more is read than is wanted."""
    first, last = int(wanted.min()), int(wanted.max())
    if last - first < _MOST_READ_TOO_MUCH * len(wanted):
        with rows(range(first, last + 1)) as lent:
            yield lent[wanted - first]
        return
    for half in wanted.chunk(2):
        yield from _read(rows, half)


@dataclass(frozen=True, slots=True)
class TransposedRows(Taken):
    """Rows [start, start + num_rows) of [num_source_rows, I], transposed: [I, num_rows]. One number
    for each row is a column: I is 1."""

    start: int
    num_rows: int
    num_source_rows: int

    def shape(self, source: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(source[1:]), self.num_rows)

    def read(self, rows: ReadRows, span: range) -> torch.Tensor:
        with rows(range(self.start, self.start + self.num_rows)) as lent:
            return lent.view(self.num_rows, -1)[:, span.start : span.stop].T.contiguous()
