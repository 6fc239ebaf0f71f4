"""LayerNorm in torch (arXiv:1607.06450).

    y = weight * (x - mean) / sqrt(variance + eps) + bias

Computed in fp32 and rounded once at the end, as torch does. Called by `layers.norm`.

Shapes: ... any leading dimensions, D normalised size. dtypes: fp32, bf16, fp16; all tensors alike.
"""

import torch
from torch.nn import functional


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x [..., D], weight and bias [D] -> [..., D]. No bias means zeros."""
    if x.shape[-1:] != weight.shape or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, but x, {tuple(x.shape)} {x.dtype}, "
            f"needs {tuple(x.shape[-1:])} {x.dtype}"
        )
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
