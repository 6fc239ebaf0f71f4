"""Records a model's operators between linears and attention as native operations.

`recorder.py` explains recording, and records linears and attention.
"""

from typing import Any

import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.cpu.abi import ActivationKind, Epilogue, OpKind
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.mixture import router_struct
from quire.kernels.cpu.program import Memory, NotedPlace, Operand, Operation
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recording import Recording, address_of
from quire.kernels.operators import Operators, RowTable
from quire.kernels.routing import RouterSpec, Routing


class OperatorRecorder(Recording, Operators):
    """Records each operator instead of computing it."""

    def embed(self, table: torch.Tensor | RowTable, indices: torch.Tensor) -> torch.Tensor:
        by_position = indices is self._values.positions
        if not by_position and indices is not self._values.token_ids:
            raise UnrecordableError("other token ids than the step's are embedded")
        fields: dict[str, Any]
        if isinstance(table, PackedLinear):
            width, fields = table.num_inputs, {"linear": address_of(table.struct)}
        elif isinstance(table, torch.Tensor):
            width, fields = table.shape[1], {"weight": self._dense(table)}
        else:
            raise UnrecordableError(f"rows of {type(table).__name__} are looked up")
        out = self._values.new(Memory("residual", width, self._dtype, dense=True))
        fields |= {"size": width, "by_position": by_position}
        self._add(OpKind.EMBED, None, out, fields, table)
        return out.rows

    def put_rows(self, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Notes the place between two operations where a step may put its rows, which no operation
        does. `index` and `rows` are placeholders."""
        return self._put_place(x, 0, adds=False)

    def add_rows(
        self, x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, first: int
    ) -> torch.Tensor:
        return self._put_place(x, first, adds=True)

    def _put_place(self, x: torch.Tensor, first: int, *, adds: bool) -> torch.Tensor:
        if not self._values.is_replaceable(x):
            raise UnrecordableError("rows are put into a part of a value")
        out = self._values.over(x)
        memory = self._values.operand(out).memory
        self._ops.put_places.append(NotedPlace(len(self._ops), memory, first, adds))
        return out

    def given(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self._values.new(self._memory_of(rows)).rows

    def keep(self, x: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        operand = self._values.operand(x)
        if operand.num_heads > 1 or operand.memory.dtype != rows.dtype:
            raise UnrecordableError("rows that are kept have heads, or another dtype")
        self._copy(operand, Operand(self._memory_of(rows), first, operand.width))

    def join(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        first, second = self._pair(left, right)
        if first.num_heads > 1:
            raise UnrecordableError("rows with heads are joined")
        whole = self._new("joined", first.width + second.width, first.memory.dtype)
        self._copy(first, Operand(whole.memory, 0, first.width))
        self._copy(second, Operand(whole.memory, first.width, second.width))
        return whole.rows

    def _copy(self, x: Operand, out: Operand) -> None:
        self._ops.append(Operation(OpKind.SCALE, x, out, {"factor": 1.0, "size": x.width}))

    @staticmethod
    def _memory_of(rows: torch.Tensor) -> Memory:
        """The memory of rows that exist outside the program."""
        return Memory("caller's", rows.shape[1], rows.dtype, is_given=True, rows=rows)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
        operand = self._values.operand(x)
        kind = OpKind.RMS_NORM
        fields: dict[str, Any] = {"size": operand.width, "eps": eps}
        if weight is not None:
            fields["weight"] = self._weight_of(operand, weight)
        if offset is not None:
            kind, fields["factor"] = OpKind.OFFSET_RMS_NORM, offset
        if overwrites and not operand.memory.is_given:
            self._ops.append(Operation(kind, operand, operand, fields, weight))
            return x
        out = self._values.like(x, "normed")
        self._ops.append(Operation(kind, operand, self._values.operand(out), fields, weight))
        return out

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
        """The sum overwrites the residual if the residual is the complete result of an operation.
        If the last operation is the linear that computed x, that linear adds its result to the
        residual."""
        operand, addend = self._pair(x, residual)
        if x.shape != residual.shape:
            raise UnrecordableError("an addend has another shape")
        last = self._ops.last
        is_replaceable = self._values.is_replaceable(residual)
        if is_replaceable and scale == 1.0 and operand.is_whole and _stores(last, operand, addend):
            assert last is not None
            out = self._values.over(residual)
            last.out = _whole_operand(addend)
            last.fields = {**last.fields, "epilogue": Epilogue.ADD_RESIDUAL}
            self._values.in_place_of(x)
            return out
        out = self._values.over(residual) if is_replaceable else self._values.over_or_like(x, "sum")
        fields = {"factor": scale, "size": operand.width}
        self._compute(OpKind.SCALE, operand, out, fields, second=addend)
        return out

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        operand = self._values.operand(x)
        out = self._values.over_or_like(x, "scaled")
        self._compute(OpKind.SCALE, operand, out, {"factor": factor, "size": operand.width})
        return out

    def gated(self, gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
        operand = self._values.operand(gate_up)
        if operand.width % 2:
            raise UnrecordableError("gate and up are not halves of a row")
        out = self._values.like(gate_up, "gated", operand.width // 2)
        fields: dict[str, Any] = {"size": operand.width // 2, "factor": gating.alpha}
        fields |= {"activation": ActivationKind[gating.activation.name]}
        fields |= {"limit": gating.limit or 0.0, "up_offset": gating.up_offset}
        self._compute(OpKind.GATED, operand, out, fields)
        return out

    def gate(
        self, x: torch.Tensor, by: torch.Tensor, activation: ActivationFunction
    ) -> torch.Tensor:
        operand, gates = self._pair(x, by)
        if by.shape[:-1] != x.shape[:-1] or gates.width not in (1, operand.width):
            raise UnrecordableError("a gate's shape does not fit its operand")
        if operand.memory is gates.memory:  # a head's gate may be a column of another head
            out = self._values.like(x, "gated")
        else:
            out = self._values.over_or_like(x, "gated")
        fields = {"activation": ActivationKind[activation.name], "size": operand.width}
        self._compute(OpKind.GATE, operand, out, fields | {"second_size": gates.width}, gates)
        return out

    def activate(self, x: torch.Tensor, activation: ActivationFunction) -> torch.Tensor:
        operand = self._values.operand(x)
        out = self._values.over_or_like(x, "activated")
        fields = {"activation": ActivationKind[activation.name], "size": operand.width}
        self._compute(OpKind.ACTIVATE, operand, out, fields)
        return out

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        operand = self._values.operand(x)
        out = self._values.over_or_like(x, "capped")
        self._compute(OpKind.SOFT_CAP, operand, out, {"factor": cap, "size": operand.width})
        return out

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        operand = self._values.operand(x)
        fields: dict[str, Any] = {"size": operand.width, "eps": eps}
        fields["weight"] = self._weight_of(operand, weight)
        if bias is not None:
            fields["bias"] = self._weight_of(operand, bias)
        out = self._values.like(x, "normed")
        self._compute(OpKind.LAYER_NORM, operand, out, fields, kept=(weight, bias))
        return out

    def route(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        spec: RouterSpec,
        dtype: torch.dtype,
    ) -> Routing:
        operand = self._values.operand(logits)
        if operand.num_heads > 1 or operand.width != spec.num_experts:
            raise UnrecordableError("a router's input is not a logit for each expert")
        if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
            raise UnrecordableError(f"a router's bias is {bias.dtype}, or not contiguous")
        struct = router_struct(spec, bias, self._dtype)
        out = self._values.new(Memory("routing", 2 * spec.top_k, torch.float32))
        fields = {"experts": address_of(struct)}
        self._add(OpKind.ROUTE, operand, out, fields, (struct, bias))
        # The placeholder of ids is float; its memory holds the bits of the ids.
        return Routing(out.rows[:, : spec.top_k], out.rows[:, spec.top_k :])


def _stores(op: Operation | None, x: Operand, addend: Operand) -> bool:
    """Whether `op` is a linear that stores exactly x, and does not read the addend's memory."""
    if op is None or op.kind is not OpKind.LINEAR or op.fields["epilogue"] is not Epilogue.STORE:
        return False
    is_all = op.out.is_whole and op.out.memory is x.memory
    return is_all and not op.reads(addend.memory)


def _whole_operand(operand: Operand) -> Operand:
    return Operand(operand.memory, 0, operand.memory.width)
