"""Recurrent layers by the native CPU kernels, which read and write states in their pages.

How they keep each result the same to the bit however a prompt was cut is explained in
`csrc/recurrence/` (of `kernels/cpu`). Shapes as in `state_specs.py`.
"""

import ctypes
from ctypes import byref

import torch

from quire.kernels.cpu import abi, state_abi
from quire.kernels.cpu.library import NativeKernels
from quire.recurrence.state_backend import LayerStates, RecurrentSpec, StateBackend, StateBatch
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, Mamba2Weights, ShortConvSpec


class CpuStates(StateBackend):
    """Between `plan` and the step's last layer the batch stays unchanged."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._native: list[state_abi.StateLayer] = []
        self._step = state_abi.StateStep()
        # What the step points to.
        self._tables: ctypes.Array[state_abi.StateTable] = (state_abi.StateTable * 0)()

    @classmethod
    def create(cls, kernels: NativeKernels | None) -> StateBackend:
        assert kernels is not None, "the registry offers it where there are kernels"
        return cls(kernels)

    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        super().bind(specs, layers)
        self._native = [_bound(spec, layer) for spec, layer in zip(specs, layers, strict=True)]

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
        step.tables = ctypes.addressof(self._tables)

    def gated_delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, GatedDeltaSpec)
        q, k, v = (_with_dense_tokens(part.to(v.dtype)) for part in (q, k, v))
        g, beta = g.float().contiguous(), beta.float().contiguous()
        out = torch.empty(v.shape, dtype=v.dtype)
        call = state_abi.GatedDelta(
            num_k_heads=spec.num_k_heads,
            num_v_heads=spec.num_v_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            normalizes=spec.normalizes,
            dtype=abi.DTYPES[v.dtype],
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            g=g.data_ptr(),
            beta=beta.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
        )
        kernels, native = self._kernels, self._native[layer]
        kernels.library.gated_delta(kernels.context, native, self._step, byref(call))
        return out

    def mamba2(
        self,
        layer: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        weights: Mamba2Weights,
    ) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, Mamba2Spec)
        x, b, c = (_with_dense_tokens(part.to(x.dtype)) for part in (x, b, c))
        zeros = torch.zeros(spec.num_heads)
        a, d, bias = (
            zeros if part is None else part.float().contiguous()
            for part in (weights.a, weights.d, weights.dt_bias)
        )
        dt = dt.float().contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        call = state_abi.Mamba2(
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            state_size=spec.state_size,
            num_groups=spec.num_groups,
            dtype=abi.DTYPES[x.dtype],
            min_step=spec.min_step,
            max_step=spec.max_step,
            x=x.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            dt=dt.data_ptr(),
            a=a.data_ptr(),
            d=d.data_ptr(),
            dt_bias=bias.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
        )
        kernels, native = self._kernels, self._native[layer]
        kernels.library.mamba2(kernels.context, native, self._step, byref(call))
        return out

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self._specs[layer]
        assert isinstance(spec, ShortConvSpec)
        x = x if x.stride(1) == 1 else x.contiguous()
        taps = weight.float().T.contiguous()
        added = torch.zeros(spec.num_channels) if bias is None else bias.float().contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        call = state_abi.ShortConv(
            num_channels=spec.num_channels,
            width=spec.width,
            has_silu=spec.has_silu,
            dtype=abi.DTYPES[x.dtype],
            x=x.data_ptr(),
            weight=taps.data_ptr(),
            bias=added.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
        )
        kernels, native = self._kernels, self._native[layer]
        kernels.library.short_conv(kernels.context, native, self._step, byref(call))
        return out


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


def _with_dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size] with the elements of a token in one run, as the kernels read them."""
    is_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if is_dense else x.contiguous()
