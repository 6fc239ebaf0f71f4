"""The SwiGLU feed-forward block: down(silu(gate(x)) * up(x)). Called by the models."""

import torch
from torch import nn

from quire.kernels.silu_mul import silu_mul
from quire.layers.linear import Linear, LinearKind


class MLP(nn.Module):
    """gate and up are one fused linear, so x is read once."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            (intermediate_size, intermediate_size),
            LinearKind.COLUMN,
            bias=bias,
            dtype=dtype,
            device=device,
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
        output: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return output
