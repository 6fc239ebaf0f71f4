"""A checkpoint some of whose matrices are stored as [inputs, outputs].

The projector of Gemma 3 has this layout. Called by `models.vision.towers`.
"""

from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager

import torch

from quire.models.checkpoints.source import CheckpointSource, DerivedSource


class TransposedWeights(DerivedSource):
    """The checkpoint `source` with the two dimensions of some matrices swapped.

    Each piece of such a matrix reads all of it, so the matrices should be small.
    """

    def __init__(self, source: CheckpointSource, transposed: Collection[str]) -> None:
        """`transposed` are names of matrices."""
        self._source = source
        self._transposed = frozenset(transposed)

    @property
    def names(self) -> Set[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return shape[::-1] if name in self._transposed else shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def stored_as(self, name: str) -> str | None:
        return self._source.stored_as(name)

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        is_transposed = name in self._transposed
        stored = range(self._source.shape(name)[0]) if is_transposed else span
        with self._source.rows(name, stored) as rows:
            yield rows[:, span.start : span.stop].t() if is_transposed else rows
