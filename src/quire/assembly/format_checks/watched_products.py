"""Passes each linear's output to a callback while a model runs.

Used by checks and measurements that run a prompt when an engine starts.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from quire.formats.weight_format import LinearMethod, LinearModule
from quire.layers.linear import Linear

TOKEN_STRIDE = 7919
"""A prime. Its multiples, modulo the vocabulary's size, are spread over the whole vocabulary."""

OnProduct = Callable[[LinearModule, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a linear, its input x [..., inputs] and its product [..., outputs]. Returns the
product with which the model continues."""


@contextmanager
def watched_products(linears: Collection[Linear], on_product: OnProduct) -> Iterator[None]:
    """A context in which each product of these linears is passed to `on_product`."""
    methods = {linear: linear.method for linear in linears}
    watched = {method: _Watched(method, on_product) for method in methods.values()}
    try:
        for linear, method in methods.items():
            linear.method = watched[method]
        yield
    finally:
        for linear, method in methods.items():
            linear.method = method


class _Watched(LinearMethod):
    """Multiplies with the method `inner`, one linear at a time. Passes each product to
    `on_product`."""

    def __init__(self, inner: LinearMethod, on_product: OnProduct) -> None:
        self._inner, self._on_product = inner, on_product

    def takes_experts_with(self, down: LinearMethod) -> bool:
        return False

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._on_product(linear, x, self._inner.apply(linear, x, out_dtype))

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return self._inner.num_bytes(num_outputs, num_inputs, dtype)

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        raise AssertionError("the model is loaded")

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        raise AssertionError("the model is loaded")
