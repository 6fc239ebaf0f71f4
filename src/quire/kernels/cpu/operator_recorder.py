"""Records a model's operators as native operations: all that is between linears and attention.

`recorder.py` says what recording is, and adds the rest.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.cpu.abi import Epilogue, OpKind
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.program import Memory, Operand, Operation, OperationList
from quire.kernels.cpu.recorded_values import UnrecordableError, Value, Values
from quire.kernels.operators import RowTable
from quire.kernels.routing import RouterSpec, Routing


class OperatorRecorder:
    """`kernels.operators.Operators`. dtype: the model's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._values = Values()
        self._ops = OperationList()

    def embed(self, table: torch.Tensor | RowTable, indices: torch.Tensor) -> torch.Tensor:
        if indices is not self._values.token_ids:
            raise UnrecordableError("other token ids than the step's are embedded")
        fields: dict[str, Any]
        if isinstance(table, PackedLinear):
            width, fields = table.num_inputs, {"linear": address_of(table.struct)}
        elif isinstance(table, torch.Tensor):
            width, fields = table.shape[1], {"weight": self._dense(table)}
        else:
            raise UnrecordableError(f"rows of {type(table).__name__} are looked up")
        out = self._values.new(Memory("residual", width, self._dtype, dense=True))
        self._add(OpKind.EMBED, None, out, {"size": width} | fields, table)
        return out.rows

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
        if weight is None:
            raise UnrecordableError("a norm has no weight")
        operand = self._values.operand(x)
        kind = OpKind.RMS_NORM
        fields: dict[str, Any] = {"size": operand.width, "eps": eps, "weight": self._dense(weight)}
        if offset is not None:
            kind, fields["factor"] = OpKind.OFFSET_RMS_NORM, offset
        if overwrites:
            self._ops.append(Operation(kind, operand, operand, fields, weight))
            return x
        out = self._new("normed", operand.width)
        self._add(kind, operand, out, fields, weight)
        return out.rows

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float | None = None,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, residual, scale)
        return self.rms_norm(total, weight, eps, offset), total

    def add(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """In place of the residual; by the linear that computed x, if nothing came in between."""
        operand, out = self._values.operand(x), self._values.in_place_of(residual)
        last = self._ops[-1] if self._ops else None
        if last is not None and scale == 1.0 and operand.is_whole and _stores(last, operand.memory):
            last.out = _whole(out)
            last.fields = {**last.fields, "epilogue": Epilogue.ADD_RESIDUAL}
            self._values.in_place_of(x)
        else:
            fields = {"epilogue": Epilogue.ADD_RESIDUAL, "factor": scale, "size": operand.width}
            self._add(OpKind.SCALE, operand, out, fields)
        return out.rows

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        operand, out = self._values.operand(x), self._values.in_place_of(x)
        self._add(OpKind.SCALE, operand, out, {"factor": factor, "size": operand.width})
        return out.rows

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise UnrecordableError("silu is an epilogue of its linear, and no operation")

    def gated(self, gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
        operand = self._values.operand(gate_up)
        if gating != Gating(ActivationFunction.GELU_TANH) or not operand.is_whole:
            raise UnrecordableError("of gates only gelu's approximation by tanh is an operation")
        out = self._new("gated", operand.width // 2)
        self._add(OpKind.GELU_MUL, operand, out, {"size": operand.width // 2})
        return out.rows

    def gate(
        self, x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction
    ) -> torch.Tensor:
        raise UnrecordableError("a gate by another value is no operation")

    def activate(self, x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
        raise UnrecordableError("an activation without a gate is no operation")

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        raise UnrecordableError("a soft cap outside of attention is no operation")

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        raise UnrecordableError("LayerNorm is no operation")

    def route(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        spec: RouterSpec,
        dtype: torch.dtype,
    ) -> Routing:
        raise UnrecordableError("the choice of experts is no operation")

    def _new(self, role: str, width: int, dtype: torch.dtype | None = None) -> Value:
        return self._values.new(Memory(role, width, dtype or self._dtype))

    def _dense(self, parameter: torch.Tensor) -> int:
        """Its address."""
        if parameter.dtype != self._dtype or not parameter.is_contiguous():
            raise UnrecordableError(f"a parameter is {parameter.dtype}, or not contiguous")
        return parameter.data_ptr()

    def _add(
        self,
        kind: OpKind,
        x: Operand | None,
        out: Value,
        fields: Mapping[str, Any],
        kept: object = None,
    ) -> None:
        self._ops.append(Operation(kind, x, _whole(out), fields, kept))


def _stores(op: Operation, memory: Memory) -> bool:
    """Whether it is a linear that stores its result there as it is."""
    is_linear = op.kind is OpKind.LINEAR and op.fields["epilogue"] is Epilogue.STORE
    return is_linear and op.out.memory is memory


def _whole(value: Value) -> Operand:
    return Operand(value.memory, 0, value.memory.width)


def address_of(struct: ctypes.Structure) -> int:
    """Where the structure lies; it must outlive what points to it."""
    return ctypes.addressof(struct)
