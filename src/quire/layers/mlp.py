"""The gated feed-forward block: down(act(gate(x)) * up(x)). Called by the models."""

from typing import Unpack

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.unnormed_rows import UnnormedRows
from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import NormReader
from quire.layers.storage import Storage


class MLP(NormReader):
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

    @property
    def input_linear(self) -> Linear | None:
        return self.gate_up_proj if self.gating == Gating() else None

    def forward(self, x: torch.Tensor | UnnormedRows) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        if self.gating == Gating():
            gated = self.gate_up_proj.silu_mul(x)
        else:
            assert isinstance(x, torch.Tensor), "only SILU is computed with the norm"
            gated = self.operators.gated(self.gate_up_proj(x), self.gating)
        output: torch.Tensor = self.down_proj(gated)
        return output
