"""The weighted sum of what a token's experts compute, in torch.

Called by the methods of linears that have no product of many experts at once; the native and the
Triton forms have this as their reference. A token's experts are added in ascending order, each
product with a weight rounded to the model's dtype before it is added, as in transformers:

    out[t] = round(.. round(0 + round(w[t, e1] y[e1])) .. + round(w[t, eK] y[eK])),  e1 < .. < eK

so the result depends on nothing but the token.

Shapes: T tokens, K experts of a token, E experts, H hidden size, R tokens of one expert.
"""

from collections.abc import Callable

import torch

from quire.kernels.routing import Routing

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""(an expert's id, the inputs [R, H] of its tokens) -> its outputs [R, H]."""


def mix_experts(x: torch.Tensor, routing: Routing, compute: Expert) -> torch.Tensor:
    """x [T, H] -> [T, H]. compute: called once for each expert that a token has."""
    output = torch.zeros_like(x)
    for expert in torch.unique(routing.ids).tolist():
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        outputs = compute(expert, x[tokens])
        weighted = outputs * routing.weights[tokens, places, None]
        output[tokens] += weighted.to(output.dtype)
    return output
