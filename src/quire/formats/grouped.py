"""Computes all experts of a layer at once with Triton's grouped matrix products.

Called by the Triton methods of `dense.py`, `int8.py` and `int4.py`.

Shapes: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.formats.weight_format import ExpertLinears, LinearModule
from quire.kernels.operators import Operators
from quire.kernels.routing import Routing

Group = Callable[[tuple[LinearModule, ...]], Any]
"""Linears of all experts -> their weights in the form that the format's product takes."""


@dataclass(frozen=True, slots=True)
class GroupedWeightsOfLayer:
    """Weights of all experts of a layer, in the form that the format's grouped product takes."""

    gate_up: object
    down: object


class GroupedExperts:
    """Multiplies a layer's experts in one format. `group` prepares the weights of all experts for
    `multiply`, such as `grouped_matmul`. `operators` compute the activation."""

    def __init__(self, group: Group, multiply: Callable[..., torch.Tensor], operators: Operators):
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import grouped_matmul

        self._plans, self._group, self._multiply = grouped_matmul, group, multiply
        self._operators = operators

    def mix(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> [T, H]: see `LinearMethod.experts`. Never waits for the GPU."""
        if layer.state is None:
            layer.state = GroupedWeightsOfLayer(self._group(layer.gate_up), self._group(layer.down))
        weights = layer.state
        assert isinstance(weights, GroupedWeightsOfLayer)
        plan = self._plans.plan_groups(routing.ids, len(layer.down))
        both = self._multiply(x, weights.gate_up, plan, pairs_per_row=routing.ids.shape[1])
        inner = self._operators.gated(both, layer.gating)
        outputs = self._multiply(inner, weights.down, plan, pairs_per_row=0)
        output: torch.Tensor = self._plans.add_experts(outputs, routing.weights, plan)
        return output


def biases_of(linears: tuple[LinearModule, ...]) -> list[torch.Tensor] | None:
    """The biases of all linears; None if the linears have no biases."""
    return [each.bias for each in linears if each.bias is not None] or None
