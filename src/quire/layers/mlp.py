"""The gated feed-forward block: down(act(gate(x)) * up(x)). Called by the models."""

import torch

from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import OperatorModule

SILU = "silu"
GELU_APPROXIMATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
"""As a config.json names the function -> as torch names its form."""


class MLP(OperatorModule):
    """gate and up are one fused linear, so x is read once.

    activation: SILU, which their linear computes too, or a key of GELU_APPROXIMATIONS.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        activation: str = SILU,
    ) -> None:
        super().__init__()
        self.approximate = None if activation == SILU else GELU_APPROXIMATIONS[activation]
        self.gate_up_proj = Linear(
            hidden_size,
            (intermediate_size, intermediate_size),
            LinearKind.COLUMN,
            bias=bias,
            dtype=dtype,
            device=device,
            gated=True,
        )
        self.down_proj = Linear(
            intermediate_size,
            (hidden_size,),
            LinearKind.ROW,
            bias=bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        if self.approximate is None:
            gated = self.gate_up_proj.silu_mul(x)
        else:
            gated = self.operators.gelu_mul(self.gate_up_proj(x), self.approximate)
        output: torch.Tensor = self.down_proj(gated)
        return output
