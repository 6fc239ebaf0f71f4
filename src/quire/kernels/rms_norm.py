"""RMSNorm, alone or after adding to the residual stream, in torch.

Source: arXiv:1910.07467.

    y = weight * x / sqrt(mean(x^2) + eps)

The mean and the division are in fp32. The rest is as in the model's class in transformers:

    offset None     the quotient is rounded to x's dtype, then multiplied by the weight (Llama)
    offset a number quotient * (weight + offset) in fp32 is rounded: 0 for OLMo 2, 1 for Gemma

Called by `layers.norm`.

Shapes: ... any leading dimensions, D normalised size. dtypes: fp32, bf16, fp16; all tensors alike.
"""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float | None = None
) -> torch.Tensor:
    """x [..., D], weight [D] -> [..., D]. No weight means ones."""
    if weight is not None:
        _check(x, weight)
    return _rms_norm_torch(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight [D] -> (norm of the sum, the sum), each [..., D].

    The sum is residual + scale * x, rounded to x's dtype. If scale is not 1, the product is rounded
    too. Neither argument is overwritten.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, but must be like x, "
            f"{tuple(x.shape)} {x.dtype}"
        )
    total = residual + (x if scale == 1.0 else x * scale)
    return _rms_norm_torch(total, weight, eps, offset), total


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[-1:] != weight.shape or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, but x, {tuple(x.shape)} {x.dtype}, "
            f"needs {tuple(x.shape[-1:])} {x.dtype}"
        )


def _rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float | None
) -> torch.Tensor:
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return quotient.to(x.dtype)
    if offset is not None:
        return (quotient * (weight.float() + offset)).to(x.dtype)
    return quotient.to(x.dtype).mul_(weight)
