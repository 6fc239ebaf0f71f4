"""The norms with their weights; their `operators` compute them."""

import torch

from quire.formats.weight_format import empty_parameter
from quire.layers.operator_module import OperatorModule


class RMSNorm(OperatorModule):
    """Normalises the last dimension, D = size. offset: as `kernels.rms_norm` says."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = empty_parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor, *, overwrites: bool = False) -> torch.Tensor:
        """x [..., D] -> [..., D]. overwrites: x is not read afterwards."""
        return self.operators.rms_norm(x, self.weight, self.eps, self.offset, overwrites=overwrites)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (norm of the sum, the sum), residual + scale * x. Neither is
        read afterwards."""
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps, self.offset, scale)


class LayerNorm(OperatorModule):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension, D = size."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((size,), dtype, device)
        self.bias = empty_parameter((size,), dtype, device) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return self.operators.layer_norm(x, self.weight, self.bias, self.eps)
