"""The weighted sum of the outputs of each token's experts, in torch.

Used for weight formats that have no kernel for many experts at once. The native and Triton kernels
are tested against it. As in transformers, a token's experts are added in ascending order of their
ids, and each weighted output and each sum is rounded to the model's dtype:

    out[t] = round(.. round(0 + round(w[t, e1] y[e1])) .. + round(w[t, eK] y[eK])),  e1 < .. < eK

Here w[t, e] is the weight of expert e for token t, and y[e] the expert's output for that token. The
order is fixed, so a token's result does not depend on the other tokens.

Shapes: T tokens, K experts of a token, E experts, H hidden size, R tokens of one expert.
"""

from collections.abc import Callable

import torch

from quire.kernels.routing import Routing

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""(an expert's id, the inputs [R, H] of its tokens) -> the expert's outputs [R, H]."""


def mix_experts(x: torch.Tensor, routing: Routing, compute: Expert) -> torch.Tensor:
    """x [T, H] -> out [T, H]. `compute` is called once for each expert that any token uses."""
    output = torch.zeros_like(x)
    for expert in torch.unique(routing.ids).tolist():
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        outputs = compute(expert, x[tokens])
        weighted = outputs * routing.weights[tokens, places, None]
        output[tokens] += weighted.to(output.dtype)
    return output
