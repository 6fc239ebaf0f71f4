"""A feed-forward block without a gate. Called by the models.

If torch computes the activation, a row's result is the same in any batch only if F is a multiple of
64. For other sizes, torch uses another formula for the elements after the tensor's last full
vector.

Shapes: ... any leading dimensions, T tokens, H hidden size, F intermediate size.
"""

from typing import Unpack

import torch

from quire.kernels.activations import ActivationFunction
from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage


class FeedForward(OperatorModule):
    """down(act(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: ActivationFunction,
        bias: bool = True,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.activation = activation
        sizes = (hidden_size, intermediate_size)
        kinds = (LinearKind.COLUMN, LinearKind.ROW)
        self.up_proj, self.down_proj = (
            Linear(inputs, (outputs,), kind, bias=bias, **storage)
            for inputs, outputs, kind in zip(sizes, reversed(sizes), kinds, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        inner = self.operators.activate(self.up_proj(x), self.activation)
        output: torch.Tensor = self.down_proj(inner)
        return output
