"""Attention over paged memory in plain torch: the CPU path, and the oracle of faster backends.

A layer's page is [2, B, Hkv, D], K then V, in the KV dtype: gathered blocks read as [L, Hkv, D]
without a transpose. Stored tokens are gathered into a workspace, widened to fp32 and attended
there: scores, softmax and sums are fp32 for every KV dtype. Built by `registry.py`; how a step is
cut, and what the words tile, piece, span and grain mean, is in `torch_plan.py`.

What holds on the CPU, and is tested: a decode row's result depends on its own context alone, to the
bit, whatever decodes beside it and in whatever order. Chunks go through torch's fused attention,
whose sums depend on the number of threads and on where its buffers lie: for them, and between a
token computed by decode and the same token computed in a chunk, results agree to fp32 rounding.

Page memory that belongs to no visible token is never multiplied: it may hold NaN.
"""

import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVPageFormat,
    LayerKV,
)
from quire.attention.torch_attend import (
    Part,
    TileParts,
    add_sinks,
    attend_fused,
    attend_materialized,
    attend_tiles,
    merge_tiles,
    merge_two,
    pack_queries,
)
from quire.attention.torch_plan import (
    TILE_TOKENS,
    ChunkTile,
    DecodePiece,
    GroupPlan,
    PageGeometry,
    PlanKey,
    plan_group,
)
from quire.errors import ConfigurationError

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 2048
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Workspace:
    """A buffer that grows to the largest gather and is then used again.

    A fresh one for each gather costs ten times the gather itself once it is large enough for the
    allocator to map and unmap it each time (12 ms against 1.1 ms for 33 MB; AMD EPYC, 2 cores).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, num_elements: int) -> torch.Tensor:
        """[num_elements], valid until the next call."""
        if self._buffer.shape[0] < num_elements:
            self._buffer = self._buffer.new_empty(num_elements)
        return self._buffer[:num_elements]


class _BoundLayer:
    """A layer with its memory: tokens to write, grains to gather, its place in the plan."""

    def __init__(self, spec: AttentionSpec, layer: LayerKV) -> None:
        assert layer.pages.dtype == torch.uint8
        assert layer.pages.shape[1] == layer.format.bytes_per_layer
        self.spec = spec
        self.group = layer.group
        self.block_size = layer.format.block_size
        geometry = PageGeometry.of(spec, layer)
        materialized = spec.soft_cap is not None or layer.pages.device.type != "cpu"
        self.key = PlanKey(layer.group, spec.window, spec.causal, materialized, geometry)
        self.pool = geometry.flat_view(layer)
        shape = (-1, 2, self.block_size, spec.num_kv_heads, spec.head_dim)
        pages = layer.pages.view(layer.format.dtype).view(shape)
        self.keys, self.values = pages.unbind(1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool = False,
    ) -> Part:
        """A chunk's queries against one span: fp32 attention as the spec says, sinks aside."""
        if self.key.materialized:
            cap = self.spec.soft_cap
            return attend_materialized(q, k, v, self.spec.scale, is_causal, mask, cap)
        return attend_fused(q, k, v, self.spec.scale, is_causal, mask)


class TorchPagedAttention(AttentionBackend):
    """See the module's text. Between `plan` and the step's last `run` the batch stays unchanged."""

    def __init__(self) -> None:
        self._layers: tuple[_BoundLayer, ...] = ()
        self._plans: dict[PlanKey, GroupPlan] = {}
        self._slots: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._workspaces: dict[torch.dtype, _Workspace] = {}
        self._num_tokens = self._num_decodes = 0

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> KVPageFormat:
        is_power_of_two = block_size > 0 and block_size & (block_size - 1) == 0
        if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigurationError(
                f"block_size={block_size} is not a power of two from {MIN_BLOCK_SIZE} to "
                f"{MAX_BLOCK_SIZE}; choose one, 16 is the default"
            )
        if dtype not in KV_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in KV_DTYPES)
            raise ConfigurationError(f"KV dtype {dtype} can't be served; choose one of {names}")
        if spec.num_heads % spec.num_kv_heads:
            raise ConfigurationError(
                f"num_heads={spec.num_heads} is not a multiple of num_kv_heads="
                f"{spec.num_kv_heads}; every KV head must serve as many query heads"
            )
        num_elements = 2 * block_size * spec.num_kv_heads * spec.head_dim
        return KVPageFormat(block_size, dtype, num_elements * dtype.itemsize)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        pairs = zip(specs, layers, strict=True)
        self._layers = tuple(_BoundLayer(spec, layer) for spec, layer in pairs)
        for bound in self._layers:
            device = bound.pool.device
            for dtype in (bound.pool.dtype, torch.float32):
                self._workspaces.setdefault(dtype, _Workspace(dtype, device))

    def plan(self, batch: AttentionBatch) -> None:
        self._num_tokens = sum(batch.query_lens_list)
        self._num_decodes = batch.num_decodes
        self._plans = {key: plan_group(key, batch) for key in {b.key for b in self._layers}}
        self._slots = {}
        for group, block_size in {(b.group, b.block_size) for b in self._layers}:
            slots = batch.groups[group].slot_mapping
            self._slots[group, block_size] = (slots // block_size, slots % block_size)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run_with_lse(layer, q, k, v, sinks)[0]

    def run_with_lse(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bound = self._layers[layer]
        assert q.shape[0] == self._num_tokens, "run serves the step that was planned"
        assert (sinks is not None) == bound.spec.has_sinks
        slots = self._slots[bound.group, bound.block_size]
        bound.keys[slots] = k.to(bound.keys.dtype)
        bound.values[slots] = v.to(bound.values.dtype)
        plan = self._plans[bound.key]
        wide_q = q.float()
        parts = [self._decode(bound, plan, wide_q)] if plan.pieces else []
        parts += [self._chunk(bound, tile, wide_q) for tile in plan.chunks]
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if sinks is not None:
            out, lse = add_sinks((out, lse), sinks)
        return out.to(q.dtype), lse

    def _decode(self, bound: _BoundLayer, plan: GroupPlan, q: torch.Tensor) -> Part:
        """All decode rows of q [T, Hq, D] -> [num_decodes, Hq, D], [num_decodes, Hq]."""
        q = q[: self._num_decodes] * bound.spec.scale
        q = pack_queries(q, bound.spec.num_kv_heads)
        parts = [self._attend_piece(bound, piece, q) for piece in plan.pieces]
        if len(parts) == 1:
            tiles = parts[0]
        else:
            tiles = TileParts(
                torch.cat([p.acc for p in parts]),
                torch.cat([p.mass for p in parts]),
                torch.cat([p.peak for p in parts]),
            )
        return merge_tiles(tiles, plan.tile_rows, self._num_decodes)

    def _attend_piece(self, bound: _BoundLayer, piece: DecodePiece, q: torch.Tensor) -> TileParts:
        num_tiles = piece.rows.shape[0]
        k, v = self._gather(bound, piece.grains, num_tiles * TILE_TOKENS, piece.garbage)
        shape = (num_tiles, TILE_TOKENS, bound.key.geometry.row)
        spec = bound.spec
        return attend_tiles(
            q.index_select(0, piece.rows),
            k.view(shape),
            v.view(shape),
            spec.head_dim,
            piece.mask,
            spec.soft_cap,
        )

    def _chunk(self, bound: _BoundLayer, tile: ChunkTile, q: torch.Tensor) -> Part:
        """The queries of one tile -> [m, Hq, D], [m, Hq], span merged by span."""
        num_heads, head_dim = bound.spec.num_heads, bound.spec.head_dim
        group_size = num_heads // bound.spec.num_kv_heads
        queries = q[tile.first : tile.last].reshape(
            -1, bound.spec.num_kv_heads, group_size, head_dim
        )
        queries = queries.permute(1, 2, 0, 3)
        merged: Part | None = None
        for span in tile.spans:
            k, v = self._gather(bound, span.grains, span.num_slots)
            k, v = (
                x[span.skip : span.skip + span.num_keys]
                .view(span.num_keys, -1, head_dim)
                .transpose(0, 1)[:, None]
                .expand(-1, group_size, -1, -1)
                for x in (k, v)
            )
            part = bound.attend(queries, k, v, span.mask, span.is_causal)
            if span.blind is not None:
                part[1].masked_fill_(span.blind, float("-inf"))
            merged = part if merged is None else merge_two(merged, part)
        assert merged is not None, "a tile has at least its own span"
        out = merged[0].permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)
        return out, merged[1].permute(2, 0, 1).reshape(-1, num_heads)

    def _gather(
        self,
        bound: _BoundLayer,
        grains: torch.Tensor,
        num_slots: int,
        garbage: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `num_slots` stored slots, [num_slots, Hkv * D] fp32, valid until the next."""
        row = bound.key.geometry.row
        stored = self._workspaces[bound.pool.dtype].take(2 * num_slots * row)
        torch.index_select(bound.pool, 0, grains, out=stored.view(-1, bound.pool.shape[1]))
        stored = stored.view(2, num_slots, row)
        if garbage is not None:
            stored.index_fill_(1, garbage, 0)
        if stored.dtype != torch.float32:
            wide = self._workspaces[torch.float32].take(stored.numel())
            stored = wide.view_as(stored).copy_(stored)
        return stored[0], stored[1]
