"""Computes all experts of a layer at once with Triton's grouped matrix products.

Called by the Triton methods of `dense.py`, `int8.py`, `int4.py` and `block_quantized`.

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
    `multiply`, such as `grouped_matmul`. `operators` compute the activation. With `has_wide_tiles`,
    `multiply` takes wider tiles for prompts, and a row's bits may depend on the batch."""

    def __init__(
        self,
        group: Group,
        multiply: Callable[..., torch.Tensor],
        operators: Operators,
        *,
        has_wide_tiles: bool = False,
    ) -> None:
        # Triton may be missing, and takes a while to load.
        from quire.kernels.triton.linear import group_plan, grouped_matmul

        self._plans, self._products = group_plan, grouped_matmul
        self._group, self._multiply = group, multiply
        self._operators = operators
        self._has_wide_tiles = has_wide_tiles

    def mix(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> [T, H]: see `LinearMethod.experts`. Never waits for the GPU."""
        if layer.state is None:
            layer.state = GroupedWeightsOfLayer(self._group(layer.gate_up), self._group(layer.down))
        weights = layer.state
        assert isinstance(weights, GroupedWeightsOfLayer)
        ids, num_experts = routing.ids, len(layer.down)
        rows = self._plans.NARROW_ROWS
        if self._has_wide_tiles and x.dtype != torch.float32:
            rows = self._plans.wide_rows(ids.numel(), num_experts)
        plan = self._plans.plan_groups(ids, num_experts, rows)
        both = self._multiply(x, weights.gate_up, plan, pairs_per_row=ids.shape[1])
        inner = self._operators.gated(both, layer.gating)
        outputs = self._multiply(inner, weights.down, plan, pairs_per_row=0)
        output: torch.Tensor = self._products.add_experts(outputs, routing.weights, plan)
        return output


def biases_of(linears: tuple[LinearModule, ...]) -> list[torch.Tensor] | None:
    """The biases of all linears; None if the linears have no biases."""
    return [each.bias for each in linears if each.bias is not None] or None
