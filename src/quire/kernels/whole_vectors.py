"""Functions of each element by itself whose results do not depend on where the element lies.

On CPUs torch computes the elements that are left over when it has gone through a tensor in vectors
by another formula, so that a token's result would depend on how many tokens there are. Called by
operators that torch computes.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

_ELEMENTS = 64
"""A multiple of the elements of every vector, in every dtype."""


def in_whole_vectors(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """function(x), of x as a dense tensor that ends with a whole vector."""
    if x.device.type != "cpu":
        return function(x)
    rest = -x.numel() % _ELEMENTS
    if rest == 0:
        return function(x.contiguous())
    return function(functional.pad(x.flatten(), (0, rest)))[: x.numel()].view(x.shape)
