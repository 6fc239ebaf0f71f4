"""A checkpoint whose stacked experts are stored as [experts, inputs, outputs].

Published Qwen3-VL mixtures have this layout. `unstacked.py` expects the layout of transformers 5,
[experts, outputs, inputs] with gate before up. Rows are transposed views, without a copy. Called
by `models.wrappers`.
"""

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch

from quire.models.checkpoints.source import CheckpointSource, DerivedSource

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


class TransposedExperts(DerivedSource):
    """The checkpoint `source` with the last two dimensions of stacked experts swapped, if needed.

    A tensor is swapped only if `hidden_size` is at the wrong position in its shape.
    """

    def __init__(self, source: CheckpointSource, hidden_size: int) -> None:
        self._source = source
        self._hidden_size = hidden_size

    @property
    def names(self) -> Set[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (shape[0], shape[2], shape[1]) if self._is_transposed(name) else shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def stored_as(self, name: str) -> str | None:
        return self._source.stored_as(name)

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        with self._source.rows(name, span) as rows:
            yield rows.transpose(1, 2) if self._is_transposed(name) else rows

    def _is_transposed(self, name: str) -> bool:
        found, shape = _STACKED.search(name), self._source.shape(name)
        if found is None or len(shape) != 3:
            return False
        inputs, outputs = shape[1:]
        mine, other = (inputs, outputs) if found[1] == "gate_up_proj" else (outputs, inputs)
        return mine == self._hidden_size != other
