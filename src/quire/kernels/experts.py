"""The weighted sum of the outputs of each token's experts, in torch.

Called for weight formats without a kernel for many experts at once, and the reference of the native
and Triton kernels. A token's experts are added in ascending order. Each weighted output is rounded
to the model's dtype before it is added, as in transformers:

    out[t] = round(.. round(0 + round(w[t, e1] y[e1])) .. + round(w[t, eK] y[eK])),  e1 < .. < eK

so a token's result does not depend on other tokens.

Shapes: T tokens, K experts of a token, E experts, H hidden size, R tokens of one expert.
"""

from collections.abc import Callable

import torch

from quire.kernels.routing import Routing

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""(an expert's id, the inputs [R, H] of its tokens) -> the expert's outputs [R, H]."""


def mix_experts(x: torch.Tensor, routing: Routing, compute: Expert) -> torch.Tensor:
    """x [T, H] -> [T, H]. `compute` is called once for each expert that any token uses."""
    output = torch.zeros_like(x)
    for expert in torch.unique(routing.ids).tolist():
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        outputs = compute(expert, x[tokens])
        weighted = outputs * routing.weights[tokens, places, None]
        output[tokens] += weighted.to(output.dtype)
    return output
