"""A checkpoint some of whose tensors are stored with their last two dimensions swapped.

The projector of Gemma 3 is stored as [inputs, outputs]. Published Qwen3-VL mixtures have stacked
experts of [experts, inputs, outputs], where `unstacked.py` expects the layout of transformers 5,
[experts, outputs, inputs] with gate before up. Called by `models.vision.towers` and
`models.wrappers`.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from quire.models.checkpoints.source import CheckpointSource, WrappedSource

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


class TransposedCheckpoint(WrappedSource):
    """The checkpoint `source` with the last two dimensions of some tensors swapped.

    Rows of stacked experts are transposed views, without a copy. Each piece of a matrix reads all
    of it, so these matrices should be small.
    """

    def __init__(self, source: CheckpointSource, swapped: Collection[str]) -> None:
        """`swapped` are names of tensors of two or three dimensions."""
        super().__init__(source)
        self._swapped = frozenset(swapped)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (*shape[:-2], shape[-1], shape[-2]) if name in self._swapped else shape

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        shape, is_swapped = self._source.shape(name), name in self._swapped
        is_matrix = is_swapped and len(shape) == 2
        with self._source.rows(name, range(shape[0]) if is_matrix else span) as rows:
            if is_matrix:
                rows = rows[:, span.start : span.stop]
            yield rows.transpose(-1, -2) if is_swapped else rows


def swapped_experts(source: CheckpointSource, hidden_size: int) -> list[str]:
    """The names of stacked experts in whose shape `hidden_size` is at the wrong position."""
    found: list[str] = []
    for name in source.names:
        stacked = _STACKED.search(name)
        if stacked is None or len(source.shape(name)) != 3:
            continue
        _, inputs, outputs = source.shape(name)
        mine, other = (inputs, outputs) if stacked[1] == "gate_up_proj" else (outputs, inputs)
        if mine == hidden_size != other:
            found.append(name)
    return found
