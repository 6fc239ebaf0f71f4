"""The operators between a model's linears, computed by Triton kernels.

`layers.operator_module.use_operators` gives them to a model. `kernels.operators.Operators` defines
their results, up to the order of sums, and computes the operators that have no Triton kernel.
"""

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.operators import Operators
from quire.kernels.triton import activations
from quire.kernels.triton.layer_norm import layer_norm
from quire.kernels.triton.rms_norm import add_rms_norm, rms_norm


class TritonOperators(Operators):
    """`kernels.operators.Operators` on a GPU. No row's result depends on the other rows."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
        return rms_norm(x, weight, eps, offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float | None = None,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps, offset, scale)

    def gated(self, gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
        return activations.gated(gate_up, gating)

    def gate(
        self, x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction
    ) -> torch.Tensor:
        return activations.gate(x, by, activation)

    def activate(self, x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
        return activations.activate(x, activation)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return activations.soft_cap(x, cap)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return layer_norm(x, weight, bias, eps)
