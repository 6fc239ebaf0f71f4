"""The gate of a SwiGLU MLP: silu(gate) * up, in torch.

Gate and up are the two halves of a fused projection (arXiv:2002.05202).

    y = silu(gate) * up,  silu(x) = x / (1 + exp(-x))

silu is rounded to the input's dtype before the product, as in transformers.

Shapes: ... any leading dimensions, F intermediate size.
"""

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2F], gate first -> [..., F]."""
    size = gate_up.shape[-1]
    if size % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but its last dimension must be even")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
