"""Per-head linears of latent attention, each of which multiplies its head's part of a token.

They are MLA's key and value projections. The key projections are applied to queries, and the value
projections to attention results, so that keys and values are never computed. Called by
`latent_attention.py`. Shapes: T tokens, H heads, I inputs and O outputs of a head.
"""

from typing import Unpack

import torch
from torch import nn

from quire.layers.linear import AdapterHalf, Linear, LinearKind, SharedHalf
from quire.layers.storage import Storage


class HeadLinears(nn.ModuleDict):
    """The linears of a rank's heads, named by the heads' numbers in the whole model.

    `shared` is the factor (A or B) of an adapter that all heads share; the first linear stores it.
    """

    def __init__(
        self,
        heads: range,
        num_inputs: int,
        num_outputs: int,
        shared: AdapterHalf,
        **storage: Unpack[Storage],
    ) -> None:
        linears = {
            str(head): Linear(
                num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=False, **storage
            )
            for head in heads
        }
        super().__init__(linears)
        self._linears = tuple(linears.values())
        for each in self._linears:
            each.may_have_wide = False
        for each in self._linears[1:]:
            each.shared_half = SharedHalf(self._linears[0], shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, I] -> [T, H, O]."""
        # Adapters are applied head by head; without them, one call multiplies all heads.
        if any(each.adapter is not None for each in self._linears):
            return torch.stack([each(x[:, at]) for at, each in enumerate(self._linears)], dim=1)
        return self._linears[0].method.heads(self._linears, x)
