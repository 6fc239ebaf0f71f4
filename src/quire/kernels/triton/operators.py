"""The operators between a model's linears, by Triton kernels.

Applied to a model by `layers.operator_module.use_operators`; defined, up to the order of sums, by
`kernels.operators.TorchOperators`, which computes what has no kernel here.
"""

import torch

from quire.kernels.operators import TorchOperators
from quire.kernels.triton.rms_norm import add_rms_norm, rms_norm
from quire.kernels.triton.silu_mul import silu_mul


class TritonOperators(TorchOperators):
    """`kernels.operators.Operators` on a GPU. A row's result does not depend on the other rows."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
        if weight is None:
            return super().rms_norm(x, weight, eps, offset)
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

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)
