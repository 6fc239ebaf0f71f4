"""Attention over the paged KV cache by the native CPU kernels.

The kernels read keys and values from their blocks and walk the block tables themselves. So a step's
plan is a few addresses and, if rows share blocks, a list of the key tiles that are read once for
several rows. The comments in `csrc/attention/attention.cpp` (of `kernels/cpu`) explain the
computation, and why a row's result is bit-identical in every batch. A native program
(`runtime.forward`) can run a step that this backend planned.

Shapes as in `interface.py`.
"""

import ctypes
from dataclasses import replace

import numpy as np
import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    KVPageFormat,
    LayerKV,
    NativeAttention,
    filled_up,
    page_format_of,
    rotated,
)
from quire.attention.kv_format import KVFormat
from quire.attention.shared_prefix import DecodeRows, SharedTiles, shared_runs
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels

TILE_TOKENS = 256
"""The number of tokens in a tile, as in csrc/attention/attention_kernels.h."""

_PLAIN, _INT8 = abi.KVLayout.PLAIN, abi.KVLayout.INT8
KV_FORMATS = {"float32": _PLAIN, "bfloat16": _PLAIN, "int8": _INT8}
"""The kernels' formats of pages by the names of KV formats."""

MAX_QUANTIZED_DIM = 512
"""Largest head size of int8 pages: kMaxQuantizedDim in csrc/attention/quantized/rotated.h."""

MIN_SAVED_TILES = 1
"""The number of tile reads that a shared run must save. A run costs less than reading one tile."""

NO_WINDOW = 2**31 - 1


class CpuPagedAttention(AttentionBackend):
    """Attention by the native kernels, which read a planned batch's tensors by address.

    The batch must not change between `plan` and the step's last `run`.
    """

    serves_sight_ahead = True

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._step = abi.Step()
        self._layers: ctypes.Array[abi.AttentionLayer] = (abi.AttentionLayer * 0)()
        self._groups: ctypes.Array[abi.KVGroupStep] = (abi.KVGroupStep * 0)()
        #: The widest window of each KV group, used to find shared runs. The kernels skip keys that
        #: a narrower window hides.
        self._windows: list[int] = []
        self._block_size = 0
        # The attributes below keep alive the memory to which the structures point.
        self._memory: tuple[LayerKV, ...] = ()
        self._batch: AttentionBatch | None = None
        self._runs: object = None
        self._sinks: dict[int, torch.Tensor] = {}

    @classmethod
    def create(cls, request: BackendRequest) -> AttentionBackend:
        assert request.kernels is not None, "the registry offers it where there are kernels"
        return cls(request.kernels)

    @property
    def native(self) -> NativeAttention:
        return NativeAttention(self._step, self._layers)

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, kv_format: KVFormat) -> KVPageFormat:
        if spec.head_dim % 2:
            raise ConfigurationError(
                f"head_dim={spec.head_dim} is odd; the native kernels need an even one"
            )
        form = page_format_of(spec, block_size, kv_format, KV_FORMATS)
        return form if KV_FORMATS[kv_format.name] is _PLAIN else _quantized_format(spec, form)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        bound = [_bound(spec, layer) for spec, layer in zip(specs, layers, strict=True)]
        self._layers = (abi.AttentionLayer * len(bound))(*bound)
        num_groups = 1 + max(layer.group for layer in layers)
        self._groups = (abi.KVGroupStep * num_groups)()
        self._step.groups = ctypes.addressof(self._groups)
        self._step.num_groups = num_groups
        self._windows = [
            max((layer.window or NO_WINDOW for layer in bound if layer.group == group), default=1)
            for group in range(num_groups)
        ]
        self._block_size = layers[0].format.block_size
        self._memory = layers

    def plan(self, batch: AttentionBatch) -> None:
        step = self._step
        step.num_tokens = batch.groups[0].slot_mapping.shape[0]
        step.num_sequences, step.num_decodes = len(batch.query_lens_list), batch.num_decodes
        step.query_start = batch.query_start.data_ptr()
        step.context_lens = batch.context_lens.data_ptr()
        step.rows = batch.rows.data_ptr()
        ends = batch.visible_ends
        step.visible_ends = None if ends is None else ends.data_ptr()
        # A drafter and its model read the same batch, whose list of groups may have more groups
        # than either of them.
        groups = batch.groups[: len(self._groups)]
        for native, group in zip(self._groups, groups, strict=True):
            native.block_tables = group.block_tables.data_ptr()
            native.table_stride = group.block_tables.stride(0)
            native.slot_mapping = group.slot_mapping.data_ptr()
        self._batch = batch
        step.num_shared_runs = 0
        if batch.num_decodes > 1:
            self._set_shared_runs(self._find_shared_runs(batch))

    def _find_shared_runs(self, batch: AttentionBatch) -> list[tuple[int, SharedTiles]]:
        """(KV group's index, run of shared tiles) for each run that `shared_prefix.py` finds."""
        count = batch.num_decodes
        context = batch.context_lens.numpy()[:count].astype(np.int64)
        table_rows = batch.rows.numpy()[:count]
        found: list[tuple[int, SharedTiles]] = []
        for group, window in enumerate(self._windows):
            low = np.maximum(context - window, 0)
            table = batch.groups[group].block_tables.numpy()
            rows = DecodeRows(table, table_rows, low, context)
            runs = shared_runs(rows, self._block_size, TILE_TOKENS, MIN_SAVED_TILES)
            found += [(group, run) for run in runs]
        return found

    def _set_shared_runs(self, runs: list[tuple[int, SharedTiles]]) -> None:
        if not runs:
            return
        natives = (abi.SharedRun * len(runs))()
        sequences = [run.rows.astype(np.int32) for _, run in runs]
        for native, (group, run), rows in zip(natives, runs, sequences, strict=True):
            native.group, native.num_sequences = group, len(rows)
            native.first_tile, native.end_tile = run.first_tile, run.end_tile
            native.sequences = rows.ctypes.data
        self._step.shared_runs = ctypes.addressof(natives)
        self._step.num_shared_runs = len(runs)
        self._runs = natives, sequences

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        bound, kernels = self._layers[layer], self._kernels
        assert inputs.rotation is None or not bound.value_dim, "models of latent layers turn q, k"
        (q, k), sinks = rotated(inputs), inputs.sinks
        q = _with_adjacent_heads(q)
        assert len(q) == self._step.num_tokens, "run serves the step that was planned"
        if bound.kv_format == _INT8:
            bound.dtype = abi.DTYPES[q.dtype]
        assert abi.DTYPES[q.dtype] == bound.dtype
        if sinks is not None:
            self._sinks[layer] = sinks.float().contiguous()
            bound.sinks = self._sinks[layer].data_ptr()
        if k is not None:
            self._write(bound, k, inputs.v)
        out = q.new_empty(*q.shape[:2], bound.value_dim or bound.v_head_dim or bound.head_dim)
        kernels.library.attention(
            kernels.context,
            bound,
            self._step,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            None,
        )
        return out

    def _write(self, bound: abi.AttentionLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        kernels, address = self._kernels, None
        k = _with_adjacent_heads(k)
        if not bound.value_dim:
            assert v is not None, "a layer that is not latent is called with values"
            v = _with_adjacent_heads(filled_up(v, bound.head_dim))
            if k.stride(0) != v.stride(0):
                k, v = k.contiguous(), v.contiguous()
            address = v.data_ptr()
        kernels.library.write_kv(
            kernels.context, bound, self._step, k.data_ptr(), address, k.stride(0)
        )


def _quantized_format(spec: AttentionSpec, form: KVPageFormat) -> KVPageFormat:
    if spec.value_dim is not None:
        raise ConfigurationError(
            "the native kernels have no int8 pages for latent layers; choose kv_cache_dtype='auto'"
        )
    if spec.head_dim > MAX_QUANTIZED_DIM:
        raise ConfigurationError(
            f"head_dim={spec.head_dim} is more than {MAX_QUANTIZED_DIM}, the largest for which the"
            " native kernels' sums over int8 pages are exact; choose kv_cache_dtype='auto'"
        )
    # Four dimensions are stored side by side (csrc/attention/quantized/quantized_page.h). head_dim
    # is even, so this rounds it up to a multiple of four.
    num_padded = 2 * form.block_size * spec.num_kv_heads * (spec.head_dim % 4)
    return replace(form, bytes_per_layer=form.bytes_per_layer + num_padded)


def _bound(spec: AttentionSpec, layer: LayerKV) -> abi.AttentionLayer:
    assert layer.pages.dtype == torch.uint8
    assert layer.pages.shape[1] == layer.format.bytes_per_layer
    return abi.AttentionLayer(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=layer.format.block_size,
        # The model's dtype. For quantized pages, `run` or the program's recorder sets it later.
        dtype=abi.DTYPES.get(layer.format.dtype, abi.DType.F32),
        group=layer.group,
        window=spec.window or 0,
        causal=spec.causal,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
        pages=layer.pages.data_ptr(),
        page_stride=layer.pages.stride(0),
        value_dim=spec.value_dim or 0,
        v_head_dim=spec.v_head_dim or 0,
        sees_ahead=spec.sees_ahead,
        kv_format=KV_FORMATS[layer.format.kv_format.name],
    )


def _with_adjacent_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with each token's elements contiguous, as the kernels require."""
    is_adjacent = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if is_adjacent else x.contiguous()
