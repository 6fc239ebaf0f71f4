"""The decay and the step size of Gated DeltaNet, in torch.

    g = -exp(a_log) * softplus(a + dt_bias),  beta = sigmoid(b)

Source: Yang et al., "Gated Delta Networks", 2024, section 3.1, in the form of Mamba-2.
Called by `kernels.operators`.

Shapes: T tokens, Hv value heads. dtypes: fp32, bf16, fp16; all tensors alike.
"""

import torch
from torch.nn import functional

from quire.kernels.whole_vectors import in_whole_vectors


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, Hv], a_log, dt_bias [Hv] -> (g, beta), each [T, Hv] fp32.

    beta is rounded to b's dtype, as in transformers; g is not rounded.
    """
    if not a.shape[1:] == b.shape[1:] == a_log.shape == dt_bias.shape:
        raise ValueError(
            f"a is {tuple(a.shape)}, b {tuple(b.shape)}, a_log {tuple(a_log.shape)} and dt_bias "
            f"{tuple(dt_bias.shape)}, but all must have the same number of heads"
        )
    g = -a_log.float().exp() * in_whole_vectors(functional.softplus, a.float() + dt_bias.float())
    return g, in_whole_vectors(torch.sigmoid, b).float()
