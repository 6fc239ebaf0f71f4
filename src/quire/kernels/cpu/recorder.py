"""Records a model's `forward` as native operations, by running it on placeholders.

A `Recorder` replaces a model's operators, linears and attention. It computes nothing, and records
each call with the values that it reads and writes. A call without a native operation raises
`UnrecordableError`, and the model's modules are run instead. So a model is written once, and a new
family can be served before there are native operations for it. `runtime.forward` puts a recorder
into a model with `recorded_by` of `layers/operator_module.py`.

Shapes: T tokens of a step, K inputs and N outputs of a linear.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, OpKind
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters, PackedRows
from quire.kernels.cpu.experts_abi import LinearsByHead
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.mixture import PackedExperts, linear_array
from quire.kernels.cpu.program import (
    Memory,
    Operand,
    Operation,
    Program,
    RowsProgram,
    SpareRows,
)
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recording import address_of
from quire.kernels.cpu.states.state_recorder import NativeStates, StateRecorder
from quire.kernels.rotary import Rotation
from quire.kernels.routing import Routing

AdaptedLinear = tuple[PackedLinear, PackedAdapters | None]
"""A linear and its adapters."""


class Recorder(StateRecorder):
    """Records operators, linears and attention: an `Operators` whose `attend` is an
    `AttentionCall`."""

    def __init__(
        self,
        kernels: NativeKernels,
        dtype: torch.dtype,
        max_num_tokens: int,
        attention_layers: ctypes.Array[abi.AttentionLayer],
        states: NativeStates | None = None,
    ) -> None:
        """`max_num_tokens` is the most tokens of a step. `attention_layers` are the bound layers,
        in the model's order. `states` is None if there are no recurrent layers."""
        super().__init__(dtype, states)
        self._kernels = kernels
        self._max_num_tokens = max_num_tokens
        self._attention_layers = attention_layers
        self._adapter_rows: PackedRows | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The placeholders of a step's token ids and positions."""
        return self._values.token_ids, self._values.positions

    def put(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Placeholders of the index and the rows of `Operators.put_rows`."""
        return self._values.positions, torch.empty(len(self._values.positions), width)

    def rows(self, width: int) -> torch.Tensor:
        """A placeholder of the caller's rows, for `finish_rows`."""
        return self._values.new(Memory("input", width, self._dtype, is_given=True)).rows

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context for `forward`, in which torch may only take views of placeholders."""
        with torch.no_grad(), _ViewsOnly(self._values.has):
            yield

    def finish(self, output: torch.Tensor) -> Program:
        """The program that computes `output`, the placeholder that `forward` returned."""
        result = self._values.operand(output)
        if not result.is_whole:
            raise UnrecordableError("the result is a part of a value")
        program = self._ops.finish(self._kernels, result.memory, self._max_num_tokens)
        return replace(program, adapter_rows=self._adapter_rows)

    def finish_rows(
        self, rows: Sequence[torch.Tensor], output: torch.Tensor, spare: SpareRows | None = None
    ) -> RowsProgram:
        """The program that computes the placeholder `output` from the placeholders `rows`. `spare`
        is described in `OperationList.finish_rows`."""
        given = [self._values.operand(each).memory for each in rows]
        result = self._values.operand(output)
        if result.memory in given or not result.is_whole:
            raise UnrecordableError("the result is a part of a value")
        return self._ops.finish_rows(
            self._kernels, given, result.memory, self._max_num_tokens, spare
        )

    def linear(
        self,
        x: torch.Tensor,
        linear: PackedLinear,
        epilogue: Epilogue = Epilogue.STORE,
        out_dtype: torch.dtype | None = None,
        adapter: PackedAdapters | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] if the epilogue multiplies gate and up."""
        operand = self._values.operand(x)
        assert epilogue is not Epilogue.ADD_RESIDUAL
        if operand.num_heads > 1 or operand.memory.dtype != self._dtype:
            raise UnrecordableError("a linear's input has heads, or another dtype than the model")
        assert operand.width == linear.num_inputs
        is_gated = epilogue is Epilogue.SILU_MUL
        width = linear.num_outputs // 2 if is_gated else linear.num_outputs
        out = self._new("gated" if is_gated else "product", width, out_dtype)
        self._multiply(operand, self._values.operand(out.rows), (linear, adapter), epilogue)
        return out.rows

    def _multiply(
        self,
        x: Operand,
        out: Operand,
        linear: AdaptedLinear,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        weights, adapter = linear
        fields = {"epilogue": epilogue, "linear": address_of(weights.struct)}
        if adapter is not None:
            fields["adapter"] = address_of(adapter.struct)
            self._adapter_rows = adapter.rows
        self._ops.append(Operation(OpKind.LINEAR, x, out, fields, linear))

    def part_linears(
        self,
        x: torch.Tensor,
        linears: Sequence[AdaptedLinear],
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, sum of N], the products of all linears side by side, in this order."""
        operand = self._values.operand(x)
        if operand.num_heads > 1 or operand.memory.dtype != self._dtype:
            raise UnrecordableError(
                "an input of linears has heads, or another dtype than the model"
            )
        whole = self._new("product", sum(each.num_outputs for each, _ in linears), out_dtype)
        first = 0
        for each, adapter in linears:
            assert operand.width == each.num_inputs
            out = Operand(whole.memory, first, each.num_outputs)
            self._multiply(operand, out, (each, adapter))
            first += each.num_outputs
        return whole.rows

    def experts(self, x: torch.Tensor, layer: PackedExperts, routing: Routing) -> torch.Tensor:
        """x [T, H] -> the weighted sum of each token's experts [T, H]."""
        operand, choice = self._values.operand(x), self._values.operand(routing.ids)
        weights = self._values.operand(routing.weights)
        are_beside = weights.memory is choice.memory and weights.offset == choice.width
        if choice.offset != 0 or choice.width != layer.top_k or not are_beside:
            raise UnrecordableError("the experts were not chosen by a recorded router")
        if operand.num_heads > 1 or operand.memory.dtype != self._dtype:
            raise UnrecordableError(
                "an input of experts has heads, or another dtype than the model"
            )
        assert operand.width == layer.num_inputs
        out = self._new("product", layer.num_outputs)
        fields = {"experts": address_of(layer.struct)}
        self._compute(OpKind.EXPERTS, operand, out.rows, fields, choice, layer)
        return out.rows

    def head_linears(self, x: torch.Tensor, linears: Sequence[AdaptedLinear]) -> torch.Tensor:
        """x [T, H, K] -> [T, H, N]: each head has its own linear.

        One operation computes all heads. With adapters, each head takes a separate operation.
        """
        operand = self._values.operand(x)
        if operand.memory.dtype != self._dtype or operand.num_heads != len(linears):
            raise UnrecordableError("an input of linears by head has other heads, or another dtype")
        weights = [each for each, _ in linears]
        out = self._values.like(x, "heads", weights[0].num_outputs)
        if any(adapter is not None for _, adapter in linears):
            for head, each in enumerate(linears):
                self._multiply(
                    self._values.operand(x[:, head]), self._values.operand(out[:, head]), each
                )
            return out
        array = linear_array(weights)
        struct = LinearsByHead(num_heads=len(weights), linears=ctypes.addressof(array))
        fields = {"experts": address_of(struct)}
        self._compute(OpKind.LINEARS_BY_HEAD, operand, out, fields, kept=(struct, array, weights))
        return out

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Records an `AttentionCall`."""
        spec = self._attention_layers[layer]
        q, k, v, sinks, rotation = inputs
        if spec.value_dim:
            if rotation is not None or sinks is not None or k is None:
                raise UnrecordableError("latent attention has sinks, a rotation or no keys")
            return self._attend_latents(self._attention_layers, layer, q, k)
        spec.dtype = abi.DTYPES[self._dtype]
        if sinks is not None:
            sinks = sinks.float().contiguous()
            spec.sinks = sinks.data_ptr()
        if (k is None) != (v is None):
            raise UnrecordableError("attention has keys without values, or values without keys")
        queries = self._rotate_and_write(spec, q, k, v, rotation)
        size = spec.v_head_dim or spec.head_dim
        out = self._new("attended", spec.num_heads * size)
        kept = (self._attention_layers, sinks)
        self._add(OpKind.ATTENTION, queries, out, {"layer": address_of(spec)}, kept)
        return out.rows.view(-1, spec.num_heads, size)

    def _rotate_and_write(
        self,
        spec: abi.AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation | None,
    ) -> Operand:
        """The normed and rotated queries, with contiguous heads. They overwrite q if its heads are
        contiguous and q is not the caller's."""
        queries = self._heads(q, spec.num_heads, spec.head_dim)
        is_stored = k is not None and v is not None
        # Without a rotation or values to store, only heads that are not contiguous need a copy.
        if rotation is None and not is_stored and queries.is_adjacent:
            return queries
        keys = values = None
        if k is not None and v is not None:
            keys = self._heads(k, spec.num_kv_heads, spec.head_dim)
            values = self._heads(v, spec.num_kv_heads, spec.v_head_dim or spec.head_dim)
        out = queries
        if not queries.is_adjacent or queries.memory.is_given:
            out = self._values.operand(self._values.like(q, "queries"))
        fields: dict[str, Any] = {"layer": address_of(spec)}
        rotary = None if rotation is None else self._rotary(rotation)
        if rotary is not None:
            fields["rotary"] = address_of(rotary)
        kept = (self._attention_layers, rotary, rotation)
        kind = OpKind.ROTATE_AND_WRITE_KV
        self._ops.append(Operation(kind, queries, out, fields, kept, keys, values))
        return out

    def _heads(self, x: torch.Tensor, num_heads: int, size: int) -> Operand:
        """The operand of x [T, heads, size]."""
        if x.shape[1:] != (num_heads, size) or x.dtype != self._dtype:
            raise UnrecordableError("an input of attention has another shape or dtype")
        return self._values.operand(x)

    def _rotary(self, rotation: Rotation) -> abi.Rotary:
        rotary = abi.Rotary()
        if rotation.angles is not None:
            if rotation.angles.positions is not self._values.positions:
                raise UnrecordableError("q and k are not rotated by the step's positions")
            table = rotation.angles.table
            rotary.table, rotary.rotary_dim = table.data_ptr(), table.shape[1]
        if rotation.q_norm is not None:
            rotary.q_norm = self._dense(rotation.q_norm)
        if rotation.k_norm is not None:
            rotary.k_norm = self._dense(rotation.k_norm)
        rotary.norm_eps = rotation.eps
        rotary.offsets_norm = rotation.norm_offset is not None
        rotary.norm_offset = rotation.norm_offset or 0.0
        return rotary


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises UnrecordableError if torch would compute from placeholders. Views are allowed."""

    def __init__(self, is_placeholder: Callable[[object], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_placeholder = is_placeholder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since torch.compile never sees this mode. Otherwise the first call of the method
        below would import torch._dynamo and Triton, which takes 2 s and 100 MB."""
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
