"""The gated feed-forward block: down(act(gate(x)) * up(x)). Called by the models."""

from typing import Unpack

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage


class MLP(OperatorModule):
    """The gated feed-forward block. Gate and up are fused in one linear, so that x is read once.

    The linear's method also computes the activation if it is SILU.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: ActivationFunction = ActivationFunction.SILU,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.gating = Gating(activation)
        self.gate_up_proj = Linear(
            hidden_size,
            (intermediate_size, intermediate_size),
            LinearKind.COLUMN,
            bias=bias,
            **storage,
            gated=True,
        )
        self.down_proj = Linear(
            intermediate_size, (hidden_size,), LinearKind.ROW, bias=bias, **storage
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        if self.gating == Gating():
            gated = self.gate_up_proj.silu_mul(x)
        else:
            gated = self.operators.gated(self.gate_up_proj(x), self.gating)
        output: torch.Tensor = self.down_proj(gated)
        return output
