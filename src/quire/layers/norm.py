"""RMSNorm with its weight. Its `operators` compute it; called by attention and models."""

import torch
from torch import nn

from quire.kernels.cpu.program import Buffer, ProgramBuilder
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Normalises the last dimension, D = size."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.operators: Operators = TORCH_OPERATORS
        self.weight = empty_parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return self.operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (norm of residual + x, residual + x). Either may be
        overwritten."""
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps)

    def lower(self, program: ProgramBuilder, x: Buffer) -> Buffer:
        """`forward`, as an operation of a native program."""
        return program.rms_norm(x, self.weight, self.eps)
