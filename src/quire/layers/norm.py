"""RMSNorm and LayerNorm with their weights; operators compute them."""

from typing import Unpack

import torch

from quire.formats.weight_format import empty_parameter
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage


class RMSNorm(OperatorModule):
    """Normalises the last dimension, D = size. `kernels.rms_norm` explains `offset`."""

    def __init__(
        self, size: int, eps: float, *, offset: float | None = None, **storage: Unpack[Storage]
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = empty_parameter((size,), **storage)

    def forward(self, x: torch.Tensor, *, overwrites: bool = False) -> torch.Tensor:
        """x [..., D] -> [..., D]. With `overwrites`, x may be overwritten."""
        return self.operators.rms_norm(x, self.weight, self.eps, self.offset, overwrites=overwrites)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (the norm of residual + scale * x, that sum).

        Both arguments may be overwritten.
        """
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps, self.offset, scale)


class LayerNorm(OperatorModule):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension, D = size."""

    weight: torch.Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        **storage: Unpack[Storage],
    ) -> None:
        """Without has_weight the weight is all ones; without has_bias no bias is added."""
        super().__init__()
        self.eps = eps
        if has_weight:
            self.weight = empty_parameter((size,), **storage)
        else:
            ones = torch.ones(size, **storage)
            self.register_buffer("weight", ones, persistent=False)
        self.bias = empty_parameter((size,), **storage) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return self.operators.layer_norm(x, self.weight, self.bias, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (the norm of residual + scale * x, that sum)."""
        total = self.operators.add(x, residual, scale)
        return self.forward(total), total
