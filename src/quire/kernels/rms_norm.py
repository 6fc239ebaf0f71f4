"""Root mean square normalisation (arXiv:1910.07467), alone or after adding to the residual stream.

    y = weight * x / sqrt(mean(x^2) + eps)

The mean and the division are fp32; the quotient is rounded to x's dtype before the weight
multiplies it: the order of transformers' LlamaRMSNorm, which checkpoints are tuned to.

Called by `layers.norm`. Knows nothing of layers or of where x comes from.

Shapes: ... any leading dimensions, D normalised size. dtypes: fp32, bf16, fp16; all tensors alike.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    _check(x, weight)
    return _rms_norm_torch(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight [D] -> (norm of the sum, the sum), each [..., D].

    The sum is rounded to x's dtype, as the residual stream is. Neither argument is written to.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, but must be like x, "
            f"{tuple(x.shape)} {x.dtype}"
        )
    total = residual + x
    return _rms_norm_torch(total, weight, eps), total


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[-1:] != weight.shape or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, but x, {tuple(x.shape)} {x.dtype}, "
            f"needs {tuple(x.shape[-1:])} {x.dtype}"
        )


def _rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype).mul_(weight)
