"""Records a model's `forward` as native operations, by running it on placeholders.

A `Recorder` takes the place of a model's operators, linears and attention: nothing is computed,
each call is noted with the values that it reads and writes. What has no native operation raises
`UnrecordableError`, and the model's modules are run instead. So a model is written once, and a
family whose arithmetic is new is served before there are native operations for it.
`layers.operator_module.recorded_by` puts a recorder into a model; called by `runtime.forward`.

Shapes: T tokens of a step, K inputs and N outputs of a linear.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, OpKind
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.program import (
    Memory,
    Operand,
    Operation,
    OperationList,
    Program,
    RowsProgram,
)
from quire.kernels.operators import RowTable
from quire.kernels.rotary import Rotation

_PLACEHOLDER_TOKENS = 2


class UnrecordableError(Exception):
    """`forward` computes something for which there is no native operation."""


@dataclass(slots=True, eq=False)
class _Value:
    """What an operation computes. rows: the placeholder that the model gets for it, [2, width].
    is_overwritten: another value was computed in its memory."""

    rows: torch.Tensor
    memory: Memory
    is_overwritten: bool = False


class _Values:
    """The values of one recording, found by their placeholders and by views of these.

    token_ids, positions: placeholders of a step's.
    """

    def __init__(self) -> None:
        self.token_ids = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self.positions = torch.zeros(_PLACEHOLDER_TOKENS, dtype=torch.int64)
        self._by_storage: dict[int, _Value] = {}

    def new(self, memory: Memory) -> _Value:
        """A value in this memory."""
        rows = torch.empty((_PLACEHOLDER_TOKENS, memory.width), dtype=memory.dtype)
        value = self._by_storage[rows.untyped_storage().data_ptr()] = _Value(rows, memory)
        return value

    def in_place_of(self, tensor: torch.Tensor) -> _Value:
        """A value that is computed where another is, which is not read afterwards."""
        if not self.operand(tensor).is_whole:
            raise UnrecordableError("a part of a value is replaced")
        replaced = self._by_storage[tensor.untyped_storage().data_ptr()]
        replaced.is_overwritten = True
        return self.new(replaced.memory)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """Where the value is of which this is a placeholder, or some columns of one."""
        value = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if value is None or tensor.dim() != 2 or tensor.stride(1) != 1:
            raise UnrecordableError("an operator is given what no operator has computed")
        if value.is_overwritten:
            raise UnrecordableError("an operator is given what another has overwritten")
        return Operand(value.memory, int(tensor.storage_offset()), tensor.shape[1])

    def has(self, tensor: object) -> bool:
        """Whether it is a placeholder, or a view of one."""
        if tensor is self.token_ids or tensor is self.positions:
            return True
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().data_ptr() in self._by_storage
        )


class Recorder:
    """`kernels.operators.Operators`, an `AttentionCall`, and what computes packed linears."""

    def __init__(
        self,
        kernels: NativeKernels,
        dtype: torch.dtype,
        max_num_tokens: int,
        attention_layers: ctypes.Array[abi.AttentionLayer],
    ) -> None:
        """max_num_tokens: the most of a step. attention_layers: bound, in the order of the model's
        attention layers."""
        self._kernels = kernels
        self._dtype = dtype
        self._max_num_tokens = max_num_tokens
        self._attention_layers = attention_layers
        self._values = _Values()
        self._ops = OperationList()

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Placeholders of a step's token ids and positions."""
        return self._values.token_ids, self._values.positions

    def rows(self, width: int) -> torch.Tensor:
        """A placeholder of the caller's rows, for `finish_rows`."""
        return self._values.new(Memory("input", width, self._dtype)).rows

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While `forward` runs: of placeholders torch may take views, and nothing else."""
        with torch.no_grad(), _ViewsOnly(self._values.has):
            yield

    def finish(self, output: torch.Tensor) -> Program:
        """The program. output: the placeholder that `forward` returned."""
        result = self._values.operand(output)
        assert result.is_whole
        return self._ops.finish(self._kernels, result.memory, self._max_num_tokens)

    def finish_rows(self, rows: torch.Tensor, output: torch.Tensor) -> RowsProgram:
        """The program from the placeholder `rows` to the placeholder `output`."""
        given, result = self._values.operand(rows), self._values.operand(output)
        return self._ops.finish_rows(
            self._kernels, given.memory, result.memory, self._max_num_tokens
        )

    def embed(self, table: torch.Tensor | RowTable, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids is not self._values.token_ids:
            raise UnrecordableError("other token ids than the step's are embedded")
        fields: dict[str, Any]
        if isinstance(table, PackedLinear):
            width, fields = table.num_inputs, {"linear": _address(table.struct)}
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
        weight: torch.Tensor,
        eps: float,
        offset: float | None = None,
        *,
        overwrites: bool = False,
    ) -> torch.Tensor:
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

    def gelu_mul(self, gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
        operand = self._values.operand(gate_up)
        if approximate != "tanh" or not operand.is_whole:
            raise UnrecordableError("only gelu's approximation by tanh is an operation")
        out = self._new("gated", operand.width // 2)
        self._add(OpKind.GELU_MUL, operand, out, {"size": operand.width // 2})
        return out.rows

    def linear(
        self,
        x: torch.Tensor,
        linear: PackedLinear,
        epilogue: Epilogue = Epilogue.STORE,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] where the epilogue multiplies gate and up."""
        operand = self._values.operand(x)
        assert operand.width == linear.num_inputs and epilogue is not Epilogue.ADD_RESIDUAL
        is_gated = epilogue is Epilogue.SILU_MUL
        width = linear.num_outputs // 2 if is_gated else linear.num_outputs
        out = self._new("gated" if is_gated else "product", width, out_dtype)
        fields = {"epilogue": epilogue, "linear": _address(linear.struct)}
        self._add(OpKind.LINEAR, operand, out, fields, linear)
        return out.rows

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `attention.interface.AttentionCall`; q, k and v must be the parts of one product."""
        if sinks is not None:
            raise UnrecordableError("attention has sinks")
        if rotation is None or rotation.angles.positions is not self._values.positions:
            raise UnrecordableError("q and k are not rotated by the step's positions")
        spec = self._attention_layers[layer]
        if v is None or spec.value_dim:
            raise UnrecordableError("attention is latent")
        spec.dtype = abi.DTYPES[self._dtype]
        qkv = self._joined(spec, q, k, v)
        rotary, attention = self._rotary(rotation), {"layer": _address(spec)}
        kept = (self._attention_layers, rotary, rotation)
        fields = attention | {"rotary": _address(rotary)}
        self._ops.append(Operation(OpKind.ROTATE_AND_WRITE_KV, None, qkv, fields, kept))
        out = self._new("attended", spec.num_heads * spec.head_dim)
        self._add(OpKind.ATTENTION, qkv, out, attention)
        return out.rows.view(-1, spec.num_heads, spec.head_dim)

    def _joined(self, spec: abi.AttentionLayer, *parts: torch.Tensor) -> Operand:
        """The product of which q, k and v are the parts, one after the other."""
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        operands = [self._values.operand(part.flatten(-2)) for part in parts]
        whole = Operand(operands[0].memory, 0, operands[0].memory.width)
        end = 0
        for part, num_heads, operand in zip(parts, heads, operands, strict=True):
            is_next = operand.memory is whole.memory and operand.offset == end
            if not is_next or part.shape[1:] != (num_heads, spec.head_dim):
                raise UnrecordableError("q, k and v are not the parts of one product")
            end += operand.width
        if end != whole.width:
            raise UnrecordableError("q, k and v are not all of their product")
        return whole

    def _rotary(self, rotation: Rotation) -> abi.Rotary:
        table = rotation.angles.table
        rotary = abi.Rotary(table=table.data_ptr(), rotary_dim=table.shape[1])
        if rotation.q_norm is not None and rotation.k_norm is not None:
            rotary.q_norm = self._dense(rotation.q_norm)
            rotary.k_norm = self._dense(rotation.k_norm)
            rotary.norm_eps = rotation.eps
        return rotary

    def _new(self, role: str, width: int, dtype: torch.dtype | None = None) -> _Value:
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
        out: _Value,
        fields: Mapping[str, Any],
        kept: object = None,
    ) -> None:
        self._ops.append(Operation(kind, x, _whole(out), fields, kept))


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute from placeholders; a view is another look at the same."""

    def __init__(self, is_placeholder: Callable[[object], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_placeholder = is_placeholder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, as torch.compile never sees this mode. Otherwise torch wraps the method below, and
        imports torch._dynamo, and with it Triton, when it is called first: 2 s and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and any(map(self._is_placeholder, _flat([*args, *kwargs.values()]))):
            raise UnrecordableError(f"torch would compute {func}")
        return func(*args, **kwargs)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _stores(op: Operation, memory: Memory) -> bool:
    """Whether it is a linear that stores its result there as it is."""
    is_linear = op.kind is OpKind.LINEAR and op.fields["epilogue"] is Epilogue.STORE
    return is_linear and op.out.memory is memory


def _whole(value: _Value) -> Operand:
    return Operand(value.memory, 0, value.memory.width)


def _address(struct: ctypes.Structure) -> int:
    return ctypes.addressof(struct)
