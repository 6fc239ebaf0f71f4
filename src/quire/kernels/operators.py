"""The operators between a model's linears, behind one interface.

A model's modules hold an `Operators` and don't know the device.
`layers.operator_module.use_operators` replaces it by Triton's operators or by the recorder of
native programs, like `Linear.use` replaces the method of a linear.

Shapes: T tokens, ... any leading dimensions, D normalised size, F intermediate size. All tensors of
a call have one dtype: fp32, bf16 or fp16.
"""

from typing import Protocol

import torch
from torch.nn import functional

from quire.kernels import activations
from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.delta_gates import delta_gates
from quire.kernels.gated_rms_norm import gated_rms_norm
from quire.kernels.join_turned import join_turned
from quire.kernels.layer_norm import layer_norm
from quire.kernels.rms_norm import add_rms_norm, rms_norm
from quire.kernels.rotary import Angles
from quire.kernels.routing import RouterSpec, Routing, route


class RowTable(Protocol):
    """A table of V vectors of H elements that is not a tensor, such as a linear's packed
    weights."""

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """Read rows: `outputs` [T] int64, each below V -> [T, H] in the model's dtype."""
        ...


class Operators:
    """Computes each operator in torch, on any device. These results define the roundings.

    Triton's operators and the recorder of native programs are subclasses.
    """

    def embed(self, table: torch.Tensor | RowTable, indices: torch.Tensor) -> torch.Tensor:
        """table of [V, H], indices [T] int64 below V (token ids or positions) -> [T, H]."""
        if isinstance(table, torch.Tensor):
            return functional.embedding(indices, table)
        return table.unpack(indices)

    def put_rows(self, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [T, H] with the first H columns of rows [N, W] in place of the rows at index [N] int64.
        x may be overwritten."""
        return x.index_copy(0, index, rows[:, : x.shape[1]].to(x.dtype))

    def add_rows(
        self, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, first: int
    ) -> torch.Tensor:
        """x [T, H] with columns [first, first + H) of rows [N, W] added to the rows at index [N]
        int64, all different. x may be overwritten."""
        added = x[index] + rows[:, first : first + x.shape[1]].to(x.dtype)
        return x.index_copy(0, index, added)

    def given(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """rows [most tokens of a step, D], token_ids [T] of the step -> the first T rows, which the
        caller has filled. The result is not overwritten."""
        return rows[: len(token_ids)]

    def keep(self, x: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Copy x [T, D] into columns [first, first + D) of the first T rows of `rows` [most tokens
        of a step, any]."""
        rows[: len(x), first : first + x.shape[1]] = x

    def join(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left [T, D], right [T, E] -> [T, D + E], side by side."""
        return torch.cat((left, right), dim=1)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
        """x [..., D], weight [D] -> [..., D]. No weight means ones. With `overwrites`, the result
        may overwrite x."""
        return rms_norm(x, weight, eps, offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float | None = None,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., D] -> (norm of the sum, the sum), where `add` defines the sum. x and
        residual may be overwritten."""
        return add_rms_norm(x, residual, weight, eps, offset, scale)

    def add(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """x, residual [..., D] -> residual + scale * x. x and residual may be overwritten."""
        return residual + (x if scale == 1.0 else x * scale)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x [..., D] -> factor * x. x may be overwritten."""
        return x * factor

    def gated(self, gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
        """gate_up [..., 2F], gate first -> [..., F], by the formula of `Gating`."""
        return activations.gated(gate_up, gating)

    def gate(
        self, x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction
    ) -> torch.Tensor:
        """x [..., D], by [..., D] or [..., 1] -> x * act(by). x may be overwritten."""
        return activations.gate(x, by, activation)

    def activate(self, x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
        """x [..., D] -> act(x). x may be overwritten."""
        if activation is ActivationFunction.GELU:
            # In place, since memory for a new tensor may take longer than the function.
            found: torch.Tensor = torch.ops.aten.gelu_(x)
            return found
        return activations.activate(x, activation)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """x [..., D] -> cap * tanh(x / cap). x may be overwritten."""
        return activations.soft_cap(x, cap)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """x [..., D], weight and bias [D] -> [..., D]."""
        return layer_norm(x, weight, bias, eps)

    def route(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        spec: RouterSpec,
        dtype: torch.dtype,
    ) -> Routing:
        """logits [T, E] in fp32 or the model's `dtype`, bias [E] fp32 -> the result of
        `routing.route`."""
        return route(logits, bias, spec, dtype)

    def scale_columns(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """x [T, D], factors [D] -> x * factors [T, D]. x may be overwritten."""
        return x * factors

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gates_first: bool = False,
    ) -> torch.Tensor:
        """x, gate [T, G, D], weight [D] or [G, D] -> [T, G, D], as in `kernels.gated_rms_norm`. x
        may be overwritten."""
        return gated_rms_norm(x, gate, weight, eps, gates_first=gates_first)

    def delta_gates(
        self, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """a, b [T, H], a_log, dt_bias [H] -> (g, beta), each [T, H] fp32, as in
        `kernels.delta_gates`."""
        return delta_gates(a, b, a_log, dt_bias)

    def join_turned(self, x: torch.Tensor, tail: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [T, H, L], tail [T, H, R] -> [x, rotated tail] [T, H, L + R]."""
        return join_turned(x, tail, angles)


TORCH_OPERATORS = Operators()
