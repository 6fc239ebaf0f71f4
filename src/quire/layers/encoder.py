"""The parts of encoders: LayerNorm, and a feed-forward block without a gate. Called by the models.

Torch computes them; each row's result is the same to the bit in any batch, as long as the
intermediate size is a multiple of 64: the elements that are left over when torch has gone through a
tensor in vectors are computed by another formula.

Shapes: ... any leading dimensions, T tokens, H hidden size, F intermediate size.
"""

import torch
from torch import nn
from torch.nn import functional

from quire.formats.weight_format import empty_parameter
from quire.layers.linear import Linear, LinearKind


class LayerNorm(nn.Module):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension, in fp32
    (arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((size,), dtype, device)
        self.bias = empty_parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> [..., H]."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class FeedForward(nn.Module):
    """down(gelu(up(x))). approximate: of gelu, as torch names its form."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        approximate: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.approximate = approximate
        sizes = (hidden_size, intermediate_size)
        kinds = (LinearKind.COLUMN, LinearKind.ROW)
        self.up_proj, self.down_proj = (
            Linear(inputs, (outputs,), kind, bias=True, dtype=dtype, device=device)
            for inputs, outputs, kind in zip(sizes, reversed(sizes), kinds, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        inner = self.up_proj(x)
        # In place: memory for a new tensor of this size costs more than the GELU (2026-11-23).
        torch.ops.aten.gelu_(inner, approximate=self.approximate)
        output: torch.Tensor = self.down_proj(inner)
        return output
