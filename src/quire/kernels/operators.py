"""What computes the operators between a model's linears: torch, or the Triton kernels of a GPU.

A model's modules hold an `Operators` and don't ask for devices; `layers.operators.use_operators`
puts another in its place from outside, as `Linear.use` does with the method of a linear.

Shapes: ... any leading dimensions, D normalised size, F intermediate size. All tensors of a call
have one dtype: fp32, bf16 or fp16.
"""

from typing import Protocol

import torch

from quire.kernels.rms_norm import add_rms_norm, rms_norm
from quire.kernels.silu_mul import silu_mul


class Operators(Protocol):
    """Each is defined, with its roundings, by the torch function of the same name."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D], weight [D] -> [..., D]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (norm of residual + x, residual + x). Either may be overwritten:
        nobody reads them afterwards."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [..., 2F], gate first -> silu(gate) * up, [..., F]."""
        ...


class TorchOperators:
    """On any device, and the definition of the others."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)


TORCH_OPERATORS = TorchOperators()
