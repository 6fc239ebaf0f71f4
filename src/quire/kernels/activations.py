"""Activation functions and the gates of MLPs, in torch.

Called by `kernels.operators`. The tests of the native and Triton kernels compare with these.

    silu(x) = x / (1 + exp(-x))
    gelu(x) = x / 2 (1 + erf(x / sqrt(2))), or its approximation by tanh (arXiv:1606.08415)
    relu(x) = max(x, 0), or its square (arXiv:2109.08668)
    identity(x) = x, for gates that are plain products

A gate multiplies an activation with a linear projection (arXiv:2002.05202). The activation is
rounded to its input's dtype before the product, as in transformers.

Shapes: ... any leading dimensions, D elements, F intermediate size. dtypes: fp32, bf16, fp16.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn import functional

from quire.kernels.whole_vectors import in_whole_vectors


class ActivationFunction(Enum):
    """The elementwise functions of MLPs and gates."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


HF_ACTIVATIONS = {
    "silu": ActivationFunction.SILU,
    "swish": ActivationFunction.SILU,
    "gelu": ActivationFunction.GELU,
    "gelu_new": ActivationFunction.GELU_TANH,
    "gelu_pytorch_tanh": ActivationFunction.GELU_TANH,
    "relu": ActivationFunction.RELU,
    "relu2": ActivationFunction.RELU_SQUARED,
}
"""The functions by their names in a config.json."""


@dataclass(frozen=True, slots=True)
class Gating:
    """The gate of an MLP, a function of two linear projections, gate and up:

        act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

    With an alpha other than 1, act(x) = x * sigmoid(alpha * x). gpt-oss has an alpha of 1.702, a
    limit of 7 and an up_offset of 1.
    """

    activation: ActivationFunction = ActivationFunction.SILU
    #: The bound of gate and up before the activation; None means that they are not clamped.
    limit: float | None = None
    #: The factor in x * sigmoid(alpha * x). It may differ from 1 for SILU only.
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        assert self.alpha == 1.0 or self.activation is ActivationFunction.SILU


def activate(x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
    """x [..., D] -> act(x), [..., D]."""
    return in_whole_vectors(lambda part: _activated(part, activation), x)


def gated(gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """gate_up [..., 2F], gate before up -> the formula of `Gating`, [..., F]."""
    size = gate_up.shape[-1]
    if size % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but its last dimension must be even")
    gate, up = gate_up.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    if gating.up_offset:
        up = up + gating.up_offset
    if gating.alpha != 1.0:
        return gate * activate(gate * gating.alpha, ActivationFunction.SIGMOID) * up
    # Halves of rows are not contiguous, so torch computes them row by row, and a row's result does
    # not depend on other rows. This does not hold for GELU, or after clamping, which returns
    # contiguous tensors.
    by_rows = gating.limit is None and gating.activation is not ActivationFunction.GELU
    function = _activated if by_rows else activate
    return function(gate, gating.activation).mul_(up)


def gate(x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
    """x [..., D], `by` [..., D] or [..., 1] -> x * act(`by`), [..., D]."""
    if by.shape[:-1] != x.shape[:-1] or by.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(
            f"by is {tuple(by.shape)}, but must have x's shape, {tuple(x.shape)}, or a last"
            " dimension of 1"
        )
    return x * activate(by, activation)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x [..., D] -> cap * tanh(x / cap), which lies within [-cap, cap]."""
    return torch.tanh(x / cap).mul_(cap)


def _activated(x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
    match activation:
        case ActivationFunction.SILU:
            return functional.silu(x)
        case ActivationFunction.GELU:
            return functional.gelu(x)
        case ActivationFunction.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case ActivationFunction.RELU:
            return functional.relu(x)
        case ActivationFunction.RELU_SQUARED:
            return functional.relu(x).square_()
        case ActivationFunction.SIGMOID:
            return torch.sigmoid(x)
        case ActivationFunction.IDENTITY:
            return x.clone()
