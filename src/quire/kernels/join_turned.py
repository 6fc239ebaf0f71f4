"""Concatenates two parts of each attention head and rotates (RoPE) the second part, in torch.

    out = [x, rotated tail]

Latent attention forms its keys, [latent, k], and its queries, [absorbed q, q], in this way
(DeepSeek-V2, arXiv:2405.04434, section 2.1.3). `kernels.rotary` defines the rotation. Called by
`kernels.operators`.

Shapes: T tokens, H heads, L elements that are not rotated, R rotated elements.
"""

import torch

from quire.kernels.rotary import Angles, rotary


def join_turned(x: torch.Tensor, tail: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [T, H, L], tail [T, H, R], angles of R elements -> [T, H, L + R]."""
    if x.shape[:2] != tail.shape[:2] or tail.shape[2] != angles.table.shape[1]:
        raise ValueError(
            f"tail is {tuple(tail.shape)}, but x, {tuple(x.shape)}, and angles of "
            f"{angles.table.shape[1]} elements need {(*x.shape[:2], angles.table.shape[1])}"
        )
    turned, _ = rotary(tail, tail[:, :0], *angles.cos_sin())
    return torch.cat((x, turned), dim=-1)
