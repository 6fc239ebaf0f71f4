"""The SwiGLU feed-forward block: down(silu(gate(x)) * up(x)). Called by the models."""

import torch
from torch import nn

from quire.kernels.cpu.program import Buffer, ProgramBuilder
from quire.layers.linear import Linear, LinearKind
from quire.layers.packed_linear import packed


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
        output: torch.Tensor = self.down_proj(self.gate_up_proj.silu_mul(x))
        return output

    def lower(self, program: ProgramBuilder, normed: Buffer, residual: Buffer) -> None:
        """`forward` of normed, added to the residual stream, as operations of a native program."""
        gated = program.silu_mul_linear(normed, packed(self.gate_up_proj), "gated")
        program.add_linear(gated, packed(self.down_proj), residual)
