"""Packs weights for the native CPU kernels while a checkpoint is loaded.

Rows of the checkpoint are packed as they are read, so there is never an unpacked copy of a weight.
All formats for which the kernels have a layout use this method; `kernels.cpu` multiplies.

Shapes: ... any leading dimensions, I input size, O output size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    SampledMethod,
)
from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.cpu.mixture import PackedExperts, mix_experts
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.operators import RowTable
from quire.kernels.quantize import num_wide_inputs, widest_inputs
from quire.kernels.routing import Routing

DENSE_LAYOUTS = {
    torch.float32: WeightLayout.DENSE_F32,
    torch.bfloat16: WeightLayout.DENSE_BF16,
}
"""The layouts that store weights of these dtypes without rounding."""


@dataclass(slots=True)
class _Packed:
    """The packed weight of a linear."""

    weights: PackedLinear

    #: The bias [O] in the checkpoint's order, only while the linear is loaded.
    bias: torch.Tensor | None

    #: The error feedback of `CompensatedMethod`; None rounds each weight to nearest.
    feedback: torch.Tensor | None = None


class PackedMethod(SampledMethod):
    """Keeps weights in one of the kernels' layouts, and the bias in fp32.

    If `layout` is None, weights are dense in the model's dtype. `group_size` is as in
    `PackedLinear`. With `has_wide`, some inputs have weights of more bits, as in INT4's vocabulary
    projection.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        layout: WeightLayout | None = None,
        group_size: int = 0,
        *,
        has_wide: bool = False,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._group_size = group_size
        self._has_wide = has_wide

    @property
    def wants_sample(self) -> bool:
        return self._has_wide

    def take_sample(self, linear: LinearModule, sample: torch.Tensor) -> None:
        packed(linear).set_wide_inputs(widest_inputs(sample))

    def _num_wide(self, num_inputs: int) -> int:
        return num_wide_inputs(num_inputs) if self._has_wide else 0

    @property
    def is_exact(self) -> bool:
        return self._layout is None or self._layout in DENSE_LAYOUTS.values()

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert device.type == "cpu"
        weights = self._make_packing(linear, bias, dtype)
        # Biases are rounded to the model's dtype, as in other methods.
        biases = torch.empty(linear.output_size, dtype=dtype) if bias else None
        linear.state = _Packed(weights, biases)

    def _make_packing(
        self, linear: LinearModule, has_bias: bool, dtype: torch.dtype
    ) -> PackedLinear:
        return PackedLinear(
            self._layout_for(dtype),
            linear.output_size,
            linear.input_size,
            group_size=self._group_size,
            num_wide=self._num_wide(linear.input_size),
            interleave=linear.part_sizes[0] if linear.gated else 0,
            has_bias=has_bias,
            dtype=dtype,
        )

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        state, start = _state(linear), linear.part_start(index) + first_row
        if parameter == "weight":
            is_known = rows.dtype in (torch.float32, torch.bfloat16)
            known = rows if is_known else rows.float()
            if state.feedback is None:
                state.weights.pack(known, start)
            else:
                state.weights.pack_compensated(known, start, state.feedback)
        else:
            assert state.bias is not None
            state.bias[start : start + len(rows)].copy_(rows)

    def finish(self, linear: LinearModule) -> None:
        state = _state(linear)
        if state.bias is not None:
            state.weights.set_bias(state.bias.float())
            state.bias = None
        state.feedback = None
        state.weights.finish()

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        shape = abi.Weights(
            self._layout_for(dtype),
            num_outputs,
            num_inputs,
            group_size=self._group_size,
            num_wide=self._num_wide(num_inputs),
        )
        library = self._kernels.library
        num_words = library.num_scales(shape) + shape.num_wide
        num_bytes: int = library.packed_bytes(shape) + 4 * num_words
        return num_bytes

    def _layout_for(self, dtype: torch.dtype) -> WeightLayout:
        return DENSE_LAYOUTS[dtype] if self._layout is None else self._layout

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._apply(linear, x, Epilogue.STORE, out_dtype)

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        return self._apply(linear, x, Epilogue.SILU_MUL)

    def _apply(
        self,
        linear: LinearModule,
        x: torch.Tensor,
        epilogue: Epilogue,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        output: torch.Tensor = apply(
            self._kernels,
            _state(linear).weights,
            x.reshape(-1, linear.input_size),
            epilogue=epilogue,
            out_dtype=out_dtype,
            adapter=linear.packed_adapters,
        )
        return output.view(*x.shape[:-1], output.shape[-1])

    @property
    def groups_experts(self) -> bool:
        return True

    def takes_experts_with(self, down: LinearMethod) -> bool:
        return isinstance(down, PackedMethod)

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._mix(_packed_experts(layer, routing.ids.shape[1]), x, routing)

    def _mix(self, layer: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return mix_experts(self._kernels, layer, x, routing)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        return _state(linear).weights if self.is_exact else None


class RecordedMethod(PackedMethod):
    """Records products as native operations; `PackedMethod` has loaded the weights."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def heads(self, linears: Sequence[LinearModule], x: torch.Tensor) -> torch.Tensor:
        adapted = [(packed(each), each.packed_adapters) for each in linears]
        return self._recorder.head_linears(x, adapted)

    def _apply(
        self,
        linear: LinearModule,
        x: torch.Tensor,
        epilogue: Epilogue,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return self._recorder.linear(x, packed(linear), epilogue, out_dtype, linear.packed_adapters)

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        for linears in (layer.gate_up, layer.down):
            if not all(map(is_packed, linears)) or len({packed(each).kind for each in linears}) > 1:
                raise UnrecordableError("experts of a layer are stored in different layouts")
        return super().experts(layer, x, routing)

    def _mix(self, layer: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._recorder.experts(x, layer, routing)


def packed(linear: LinearModule) -> PackedLinear:
    """The packed weight of a linear whose method is `PackedMethod`."""
    return _state(linear).weights


def keep_feedback(linear: LinearModule, feedback: torch.Tensor) -> None:
    """Let `PackedMethod` round rows that are loaded later with this error feedback, until the
    linear is finished."""
    _state(linear).feedback = feedback


def is_packed(linear: LinearModule) -> bool:
    """Whether the linear's method is `PackedMethod`."""
    return isinstance(linear.state, _Packed)


def _packed_experts(layer: ExpertLinears, top_k: int) -> PackedExperts:
    """The layer's packed experts, created at first use, since all linears are loaded by then."""
    if layer.state is None:
        layer.state = PackedExperts(
            [packed(linear) for linear in layer.gate_up],
            [packed(linear) for linear in layer.down],
            layer.gating,
            top_k,
        )
    assert isinstance(layer.state, PackedExperts) and layer.state.top_k == top_k
    return layer.state


def _state(linear: LinearModule) -> _Packed:
    assert isinstance(linear.state, _Packed)
    return linear.state
