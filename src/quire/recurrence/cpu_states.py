"""Recurrent layers by the native CPU kernels, which update states where they are stored.

`kernels/cpu/csrc/recurrence/` explains why results are bit-identical for any chunking of a prompt.
The shapes are those of `state_specs.py`.
"""

import ctypes
from collections.abc import Mapping
from ctypes import byref
from dataclasses import asdict

import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.states import state_abi
from quire.kernels.cpu.states.state_recorder import NativeStates
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence.state_backend import LayerStates, RecurrentSpec, StateBackend, StateBatch
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec

_Call = state_abi.GatedDelta | state_abi.Mamba2 | state_abi.ShortConv


class CpuStates(StateBackend):
    """The CPU backend. A planned batch must not change until the step's last layer has run."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._native: list[state_abi.StateLayer] = []
        self._calls: list[_Call] = []
        self._step = state_abi.StateStep()
        # The step holds a pointer to this array, so it must be kept alive.
        self._tables: ctypes.Array[state_abi.StateTable] = (state_abi.StateTable * 0)()

    @classmethod
    def create(cls, kernels: NativeKernels | None) -> StateBackend:
        assert kernels is not None, "the registry offers it where there are kernels"
        return cls(kernels)

    @property
    def native(self) -> NativeStates | None:
        return NativeStates(self._step, self._native, self._calls)

    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        super().bind(specs, layers)
        self._native = [_bound(spec, layer) for spec, layer in zip(specs, layers, strict=True)]
        self._calls = [_sized(spec) for spec in specs]

    def plan(self, batch: StateBatch) -> None:
        super().plan(batch)
        self._tables = (state_abi.StateTable * len(batch.tables))(
            *(state_abi.StateTable(table.data_ptr(), table.stride(0)) for table in batch.tables)
        )
        step = self._step
        step.num_sequences = len(batch.query_lens_list)
        step.query_start = batch.query_start.data_ptr()
        step.context_lens = batch.context_lens.data_ptr()
        step.rows = batch.rows.data_ptr()
        step.num_drafts = None if batch.num_drafts is None else batch.num_drafts.data_ptr()
        step.tables = ctypes.addressof(self._tables)

    def gated_delta(self, layer: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        q, k, v, g, beta = inputs
        q, k, v = (_with_dense_tokens(part.to(v.dtype)) for part in (q, k, v))
        dense = {"g": _as_fp32(g), "beta": _as_fp32(beta)}
        out = torch.empty(v.shape, dtype=v.dtype)
        self._run("gated_delta", layer, {"q": q, "k": k, "v": v}, dense, out)
        return out

    def mamba2(self, layer: int, inputs: Mamba2Inputs, weights: Mamba2Weights) -> torch.Tensor:
        x, dt, b, c = inputs
        x, b, c = (_with_dense_tokens(part.to(x.dtype)) for part in (x, b, c))
        dense = {
            "dt": _as_fp32(dt),
            "a": _as_fp32(weights.a),
            "d": None if weights.d is None else _as_fp32(weights.d),
            "dt_bias": None if weights.dt_bias is None else _as_fp32(weights.dt_bias),
        }
        out = torch.empty(x.shape, dtype=x.dtype)
        self._run("mamba2", layer, {"x": x, "b": b, "c": c}, dense, out)
        return out

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        if weight.dtype not in abi.DTYPES or (bias is not None and bias.dtype != weight.dtype):
            weight, bias = weight.float(), None if bias is None else bias.float()
        self._calls[layer].weight_dtype = abi.DTYPES[weight.dtype]
        dense = {"weight": weight.contiguous(), "bias": None if bias is None else bias.contiguous()}
        out = torch.empty(x.shape, dtype=x.dtype)
        self._run("short_conv", layer, {"x": x}, dense, out)
        return out

    def _run(
        self,
        kernel: str,
        layer: int,
        strided: Mapping[str, torch.Tensor],
        dense: Mapping[str, torch.Tensor | None],
        out: torch.Tensor,
    ) -> None:
        """Call a kernel. The names of tensors are field names of the kernel's argument structure.

        For tensors in `strided`, the stride between tokens is passed, too. None in `dense` is
        passed as a null pointer.
        """
        call, kernels = self._calls[layer], self._kernels
        call.dtype, call.out = abi.DTYPES[out.dtype], out.data_ptr()
        for name, x in strided.items():
            setattr(call, name, x.data_ptr())
            setattr(call, f"{name}_stride", x.stride(0))
        for name, part in dense.items():
            setattr(call, name, None if part is None else part.data_ptr())
        function = getattr(kernels.library, kernel)
        function(kernels.context, self._native[layer], self._step, byref(call))


def _bound(spec: RecurrentSpec, layer: LayerStates) -> state_abi.StateLayer:
    assert layer.pages.dtype == torch.uint8
    assert layer.units_per_page * spec.unit_bytes <= layer.pages.shape[1]
    return state_abi.StateLayer(
        group=layer.group,
        first_unit=layer.first_unit,
        units_per_page=layer.units_per_page,
        num_units=spec.num_units,
        unit_bytes=spec.unit_bytes,
        pages=layer.pages.data_ptr(),
        page_stride=layer.pages.stride(0),
    )


def _sized(spec: RecurrentSpec) -> _Call:
    """The argument structure of a layer's kernel calls, with the spec's fields filled in."""
    if isinstance(spec, GatedDeltaSpec):
        return state_abi.GatedDelta(**asdict(spec))
    if isinstance(spec, Mamba2Spec):
        return state_abi.Mamba2(**asdict(spec))
    assert isinstance(spec, ShortConvSpec)
    return state_abi.ShortConv(**asdict(spec))


def _with_dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size], copied if the elements of a token are not contiguous."""
    is_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if is_dense else x.contiguous()


def _as_fp32(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()
