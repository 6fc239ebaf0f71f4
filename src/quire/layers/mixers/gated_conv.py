"""The gated short convolution of LFM2: two gates that depend on the token, around a convolution.

Source: arXiv:2511.23404, section 2. One projection computes the gates B and C and the values x; the
result is the projection of C * conv(B * x). Called by `models.families.hybrids.lfm2`.

Shapes: T tokens, H hidden size, C channels.
"""

from typing import Unpack

import torch

from quire.kernels.activations import ActivationFunction
from quire.layers.linear import Linear, LinearKind
from quire.layers.mixers.causal_conv import CausalConv
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage
from quire.recurrence.state_specs import ShortConvSpec


class GatedConv(OperatorModule):
    """One layer's block. `layer` is the index of the convolution's state."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        spec: ShortConvSpec,
        *,
        has_bias: bool,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        size = spec.num_channels
        self.in_proj = Linear(
            hidden_size, (size, size, size), LinearKind.COLUMN, bias=has_bias, **storage
        )
        self.conv = CausalConv(layer, spec, (size,), has_bias=has_bias, **storage)
        self.out_proj = Linear(size, (hidden_size,), LinearKind.ROW, bias=has_bias, **storage)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        gate = self.operators.gate
        before, after, x = self.in_proj(hidden).chunk(3, dim=-1)
        mixed = self.conv(gate(x, before, ActivationFunction.IDENTITY))
        output: torch.Tensor = self.out_proj(gate(mixed, after, ActivationFunction.IDENTITY))
        return output
