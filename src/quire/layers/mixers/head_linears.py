"""A linear for each head, which multiplies that head's part of a token alone.

Of latent attention: what its model absorbs into queries and results differs from head to head.
Called by `latent_attention.py`. Shapes: T tokens, H heads, I inputs and O outputs of a head.
"""

import torch
from torch import nn

from quire.layers.linear import AdapterHalf, Linear, LinearKind, SharedHalf


class HeadLinears(nn.ModuleDict):
    """Named by the heads' numbers in the whole model, of which a rank has some. shared: what the
    linears of all heads have in common of an adapter, which the first one keeps."""

    def __init__(
        self,
        heads: range,
        num_inputs: int,
        num_outputs: int,
        shared: AdapterHalf,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        linears = {
            str(head): Linear(
                num_inputs,
                (num_outputs,),
                LinearKind.REPLICATED,
                bias=False,
                dtype=dtype,
                device=device,
            )
            for head in heads
        }
        super().__init__(linears)
        self._linears = tuple(linears.values())
        for each in self._linears[1:]:
            each.shared_half = SharedHalf(self._linears[0], shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, I] -> [T, H, O]."""
        if any(each.adapter is not None for each in self._linears):
            return torch.stack([each(x[:, at]) for at, each in enumerate(self._linears)], dim=1)
        return self._linears[0].method.heads(self._linears, x)
