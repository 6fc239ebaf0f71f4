"""Rotary position embedding (arXiv:2104.09864), in the half-split layout of published checkpoints.

    out[:D/2] = x[:D/2] * cos - x[D/2:] * sin
    out[D/2:] = x[D/2:] * cos + x[:D/2] * sin

Called by `layers.attention` with the step's cosines and sines from `layers.rotary`. Knows neither
positions nor rope types.

Shapes: T tokens, Hq query heads, Hkv KV heads, D head size (even). cos and sin hold each of their
D/2 values twice: [c, c]. All tensors have one dtype; q and k may be strided views.
"""

import torch


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k [T, Hkv, D], cos and sin [T, D] -> (rotated q, rotated k).

    in_place: write the results over q and k, and return those.
    """
    expected = (q.shape[0], q.shape[2])
    if cos.shape != expected or sin.shape != expected or k.shape[::2] != expected:
        raise ValueError(
            f"k is {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}, but q, "
            f"{tuple(q.shape)}, needs the same tokens and head size, cos and sin {expected}"
        )
    if not (q.dtype == k.dtype == cos.dtype == sin.dtype):
        raise ValueError(
            f"q, k, cos and sin must have one dtype, but have {q.dtype}, {k.dtype}, {cos.dtype} "
            f"and {sin.dtype}"
        )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotary_torch(q, cos, sin, in_place), _rotary_torch(k, cos, sin, in_place)


def _rotary_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool
) -> torch.Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1).mul_(sin)
    # Multiply, then add: a fused multiply-add would round once less than transformers does.
    return (x.mul_(cos) if in_place else x * cos).add_(swapped)
