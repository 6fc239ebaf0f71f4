"""A parameter that several tensors of a checkpoint are fused into.

An example is the weight of a short convolution over q, k and v: one row for each output of their
fused linear. Each part is split over ranks separately, like the parts of a linear. Called by
`layers.mixers`; filled by `models.checkpoints.loader`.
"""

from functools import partial
from typing import Unpack

import torch
from torch import nn

from quire.formats.weight_format import empty_parameter
from quire.layers.linear import WeightSlot
from quire.layers.storage import Storage


class FusedParameter(nn.Module):
    """The parts' rows in order: weight [sum of part_sizes, *row_shape], bias [sum] or None."""

    def __init__(
        self,
        part_sizes: tuple[int, ...],
        row_shape: tuple[int, ...],
        *,
        has_bias: bool = False,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.part_sizes = part_sizes
        size = sum(part_sizes)
        self.weight = empty_parameter((size, *row_shape), **storage)
        self.bias = empty_parameter((size,), **storage) if has_bias else None

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        """The slots of the checkpoint's tensors by (name, part)."""
        found = {}
        for name, whole in self.named_parameters():
            start = 0
            for index, size in enumerate(self.part_sizes):
                part = whole[start : start + size]
                slot = WeightSlot(tuple(part.shape), partial(_copy_rows, part))
                found[name, index], start = slot, start + size
        return found


def _copy_rows(part: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
    part[first_row : first_row + len(rows)].copy_(rows)
