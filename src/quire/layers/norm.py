"""RMSNorm with its weight. The arithmetic is `kernels.rms_norm`; called by attention and models."""

import torch
from torch import nn

from quire.kernels.cpu.program import Buffer, ProgramBuilder
from quire.kernels.rms_norm import add_rms_norm, rms_norm
from quire.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Normalises the last dimension, D = size."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (norm of residual + x, residual + x)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def lower(self, program: ProgramBuilder, x: Buffer) -> Buffer:
        """`forward`, as an operation of a native program."""
        return program.rms_norm(x, self.weight, self.eps)
