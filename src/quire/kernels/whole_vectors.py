"""Makes the results of elementwise torch functions independent of an element's position.

On CPUs torch computes a tensor in whole vectors, and the remaining elements by another formula. So
a token's result would depend on the number of tokens. Called by operators in torch.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

_ELEMENTS = 64
"""A multiple of the number of elements of a vector, for all dtypes and processors."""


def in_whole_vectors(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """function(x), computed on a dense copy of x that is padded to whole vectors."""
    if x.device.type != "cpu":
        return function(x)
    rest = -x.numel() % _ELEMENTS
    if rest == 0:
        return function(x.contiguous())
    return function(functional.pad(x.flatten(), (0, rest)))[: x.numel()].view(x.shape)
