"""The connector of InternVL and LFM2-VL: a norm and two linears over squares of patches.

Shapes: R squares of patches, S elements of a square, I inner size, O output size.
"""

from typing import Unpack

import torch

from quire.kernels.activations import ActivationFunction
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import LayerNorm
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage

_EPS = 1e-5
"""The eps of the norm, which is not in configs."""


class SquareConnector(OperatorModule):
    """Turns squares of patches into embeddings of the language model."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        *,
        has_norm: bool = True,
        has_bias: bool = True,
        **storage: Unpack[Storage],
    ) -> None:
        """`sizes` are S, I and O."""
        super().__init__()
        self.layer_norm: LayerNorm | None = None
        if has_norm:
            self.layer_norm = LayerNorm(sizes[0], _EPS, **storage)
        self.linear_1, self.linear_2 = (
            Linear(inputs, (outputs,), LinearKind.REPLICATED, bias=has_bias, **storage)
            for inputs, outputs in (sizes[:2], sizes[1:])
        )

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        """squares [R, S] -> [R, O]."""
        normed = squares if self.layer_norm is None else self.layer_norm(squares)
        inner = self.operators.activate(self.linear_1(normed), ActivationFunction.GELU)
        projected: torch.Tensor = self.linear_2(inner)
        return projected
