"""The gate of a GeGLU MLP: gelu(gate) * up, in torch.

Gate and up are the two halves of a fused projection (arXiv:2002.05202).

    y = gelu(gate) * up,  gelu(x) = x / 2 (1 + erf(x / sqrt(2))), or its approximation by tanh

gelu is rounded to the input's dtype before the product, as in transformers. Called by `layers.mlp`.

Shapes: ... any leading dimensions, F intermediate size.
"""

import torch
from torch.nn import functional


def gelu_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """gate_up [..., 2F], gate first -> [..., F]. approximate: "tanh", or "none"."""
    size = gate_up.shape[-1]
    if size % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but its last dimension must be even")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate).mul_(up)
