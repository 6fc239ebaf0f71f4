"""RMSNorm of each head or group, and the product with a gate, in torch.

    Gated DeltaNet   y = weight * x / sqrt(mean(x^2) + eps) * silu(gate)
    Mamba-2          y = weight * z / sqrt(mean(z^2) + eps), z = x * silu(gate)

Computed in fp32, with the roundings of transformers' classes. In the first form the quotient is
rounded before the product with the weight, and the product before the gate. Called by
`kernels.operators`.

Shapes: ... any leading dimensions, D normalised size. dtypes: fp32, bf16, fp16; all tensors alike.
"""

import torch
from torch.nn import functional

from quire.kernels.whole_vectors import in_whole_vectors


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gates_first: bool
) -> torch.Tensor:
    """x, gate [..., D], weight [..., D], which broadcasts against them -> [..., D].

    `gates_first` selects the second form.
    """
    if gate.shape != x.shape or weight.shape[-1:] != x.shape[-1:]:
        raise ValueError(
            f"gate is {tuple(gate.shape)} and weight {tuple(weight.shape)}, but x is "
            f"{tuple(x.shape)}: gate must have x's shape, and weight x's last dimension"
        )
    wide, factor = x.float(), in_whole_vectors(functional.silu, gate.float())
    if gates_first:
        wide = wide * factor
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if gates_first:
        return (weight * quotient).to(x.dtype)
    return (weight * quotient.to(x.dtype) * factor).to(x.dtype)
