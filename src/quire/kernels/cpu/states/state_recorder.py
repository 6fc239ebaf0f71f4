"""Records the operators of layers with recurrent states or latents.

`recorder.py` explains recording. The recorder also replaces the backend that updates recurrent
states (`StateBackend`). Recorded operations use copies of the structures of this backend, which is
already bound.

Shapes: T tokens, H heads, D head size, C channels.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import OpKind
from quire.kernels.cpu.operator_recorder import OperatorRecorder
from quire.kernels.cpu.program import Memory, Operand, Operation
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recording import address_of
from quire.kernels.cpu.states import state_abi
from quire.kernels.rotary import Angles
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights, StateCalls


@dataclass(frozen=True, slots=True)
class NativeStates:
    """The structures with which a program updates a backend's states directly.

    The structures' addresses don't change after the backend's `bind`.
    """

    #: The step that the backend's `plan` prepares.
    step: state_abi.StateStep
    #: The places of each recurrent layer's states.
    layers: Sequence[state_abi.StateLayer]
    #: The sizes of each recurrent layer, as the structure of its native call.
    calls: Sequence[ctypes.Structure]


class StateRecorder(OperatorRecorder, StateCalls):
    """Records the remaining methods of `Operators`, and the calls of recurrent layers."""

    def __init__(self, dtype: torch.dtype, states: NativeStates | None = None) -> None:
        """`dtype` is the model's dtype. `states` is None if no layer has states."""
        super().__init__(dtype)
        self._states = states

    def scale_columns(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        operand = self._values.operand(x)
        out = self._values.over_or_like(x, "scaled")
        fields = {"size": operand.width, "weight": self._weight_of(operand, factors)}
        self._compute(OpKind.SCALE_COLUMNS, operand, out, fields, kept=factors)
        return out

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gates_first: bool = False,
    ) -> torch.Tensor:
        operand, gates = self._pair(x, gate)
        # The distance between two heads' weights, for one weight that heads share, or one for each
        # head.
        sizes = {1: 0, operand.num_heads: operand.width}
        num_weights = weight.numel() // operand.width
        if weight.shape[-1] != operand.width or num_weights not in sizes or x.shape != gate.shape:
            raise UnrecordableError(
                "the operands of a norm with a gate have shapes that don't match"
            )
        out = self._values.over_or_like(x, "normed")
        fields = {"size": operand.width, "second_size": sizes[num_weights], "eps": eps}
        fields |= {"weight": self._dense(weight), "gates_first": gates_first}
        self._compute(OpKind.GATED_RMS_NORM, operand, out, fields, gates, weight)
        return out

    def delta_gates(
        self, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rate, bias = -a_log.float().exp(), dt_bias.float().contiguous()
        fields = {"weight": rate.data_ptr(), "bias": bias.data_ptr()}
        decay = self._wide(OpKind.DELTA_DECAY, a, fields, (rate, bias))
        return decay, self._wide(OpKind.DELTA_STEP, b, {}, None)

    def join_turned(self, x: torch.Tensor, tail: torch.Tensor, angles: Angles) -> torch.Tensor:
        operand, turned = self._pair(x, tail)
        if angles.positions is not self._values.positions:
            raise UnrecordableError("heads are not rotated by the step's positions")
        if turned.width != angles.table.shape[1] or x.shape[:-1] != tail.shape[:-1]:
            raise UnrecordableError("the parts of joined heads have shapes that don't match")
        rotary = abi.Rotary(table=angles.table.data_ptr(), rotary_dim=turned.width)
        out = self._values.like(x, "joined", operand.width + turned.width)
        fields = {"size": operand.width, "second_size": turned.width}
        fields["rotary"] = address_of(rotary)
        self._compute(OpKind.JOIN_TURNED, operand, out, fields, turned, (rotary, angles))
        return out

    def gated_delta(self, layer: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        q, k, v, *gates = inputs
        wide = tuple(self._wide_operand(part) for part in gates)
        return self._move(OpKind.GATED_DELTA, layer, (q, k, v), v.shape, wide)

    def mamba2(self, layer: int, inputs: Mamba2Inputs, weights: Mamba2Weights) -> torch.Tensor:
        x, dt, b, c = inputs
        step = self._wide_operand(self._wide(OpKind.WIDEN, dt, {}, None))
        learned = {"a": weights.a, "d": weights.d, "dt_bias": weights.dt_bias}
        wide = {
            name: None if part is None else part.float().contiguous()
            for name, part in learned.items()
        }
        return self._move(OpKind.MAMBA2, layer, (x, b, c), x.shape, (step,), wide)

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        dense = {"weight": weight.contiguous(), "bias": None if bias is None else bias.contiguous()}
        if any(part is not None and part.dtype != self._dtype for part in dense.values()):
            raise UnrecordableError("a convolution has weights of another dtype than the model")
        return self._move(OpKind.SHORT_CONV, layer, (x,), x.shape, (), dense)

    def _move(
        self,
        kind: OpKind,
        layer: int,
        parts: tuple[torch.Tensor, ...],
        shape: torch.Size,
        wide: tuple[Operand, ...],
        learned: Mapping[str, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """Record an operation that updates a layer's states and returns a result of `shape`.

        `parts` are columns of one value, and contiguous for each token. `wide` are further
        operands, in fp32. `learned` are parameters by the names of the structure's fields. None
        sets a null pointer, since the field may hold the address of an earlier call's parameter.
        """
        if self._states is None:
            raise UnrecordableError("states are updated by another backend than the native one")
        # First, check that the parts are columns of one value.
        operands = [self._values.operand(part) for part in parts]
        first = operands[0]
        are_near = all(each.memory is first.memory and each.is_adjacent for each in operands)
        if not are_near or first.memory.dtype != self._dtype:
            raise UnrecordableError("the inputs of a state are not columns of one value")
        # Then, fill the structures of the call.
        call = _copied(self._states.calls[layer])
        for name, part in (learned or {}).items():
            setattr(call, name, None if part is None else part.data_ptr())
        if kind is OpKind.SHORT_CONV:
            call.weight_dtype = abi.DTYPES[self._dtype]
        offsets = [each.offset - first.offset for each in operands[1:]] + [0, 0]
        struct = abi.StateCall(
            layer=address_of(self._states.layers[layer]),
            step=address_of(self._states.step),
            call=address_of(call),
            second_offset=offsets[0],
            third_offset=offsets[1],
        )
        # Last, add the operation.
        memory = Memory("moved", math.prod(shape[1:]), self._dtype, dense=True)
        out = self._values.new(memory).rows.view(shape)
        kept = (struct, call, learned, self._states)
        fields = {"states": address_of(struct)}
        op = Operation(kind, first, self._values.operand(out), fields, kept, *wide)
        self._ops.append(op)
        return out

    def _wide(
        self, kind: OpKind, x: torch.Tensor, fields: Mapping[str, Any], kept: object
    ) -> torch.Tensor:
        """Record an operation on x [T, H] whose result is dense fp32 [T, H]."""
        operand = self._values.operand(x)
        if x.dim() != 2 or operand.memory.dtype != self._dtype:
            raise UnrecordableError("gates of a state are not a row for each token")
        out = self._values.new(Memory("wide", operand.width, torch.float32, dense=True)).rows
        self._compute(kind, operand, out, {"size": operand.width, **fields}, kept=kept)
        return out

    def _wide_operand(self, x: torch.Tensor) -> Operand:
        operand = self._values.operand(x)
        if not operand.is_whole or operand.memory.dtype != torch.float32:
            raise UnrecordableError("gates of a state are not dense, or not fp32")
        return operand

    def _attend_latents(
        self, layers: ctypes.Array[abi.AttentionLayer], layer: int, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """q [T, H, D], k [T, 1, D] -> [T, H, value size of the latent layer]."""
        spec = layers[layer]
        spec.dtype = abi.DTYPES[self._dtype]
        queries, keys = self._values.operand(q), self._values.operand(k)
        are_right = q.shape[1:] == (spec.num_heads, spec.head_dim) and keys.width == spec.head_dim
        if not are_right or not queries.is_adjacent or queries.memory.dtype != self._dtype:
            raise UnrecordableError("an input of latent attention has another shape or dtype")
        fields = {"layer": address_of(spec)}
        self._ops.append(Operation(OpKind.WRITE_LATENT, keys, keys, fields, layers))
        out = self._new("attended", spec.num_heads * spec.value_dim)
        self._add(OpKind.ATTENTION, queries, out, fields, layers)
        return out.rows.view(-1, spec.num_heads, spec.value_dim)


def _copied(struct: ctypes.Structure) -> Any:
    return type(struct).from_buffer_copy(struct)
