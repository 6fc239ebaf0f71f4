"""Attention over paged memory in plain torch: the CPU path, and the oracle of faster backends.

A layer's page is [2, B, Hkv, D], K then V, in the KV dtype: gathered blocks read as [L, Hkv, D]
without a transpose. Stored tokens are gathered into a workspace, widened to fp32 and attended
there: scores, softmax and sums are fp32 for every KV dtype. Built by `registry.py`; how a step is
cut, and what the words tile, piece, span and grain mean, is in `torch_plan.py`.

What holds on the CPU, and is tested: a decode row's result depends on its own context alone, to the
bit, whatever decodes beside it and in whatever order, and whether or not it shares blocks with it:
tiles that several rows read are gathered and widened once, and multiplied in one product where that
gives the same bits. Chunks go through torch's fused attention, whose sums depend on the number of
threads and on where its buffers lie: for them, and between a token computed by decode and the same
token computed in a chunk, results agree to fp32 rounding.

Page memory that belongs to no visible token is never multiplied: it may hold NaN.
"""

from dataclasses import dataclass
from itertools import chain, islice

import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    KVPageFormat,
    LayerKV,
    plain_page_format,
)
from quire.attention.torch_attend import (
    Part,
    TileParts,
    add_sinks,
    attend_fused,
    attend_materialized,
    attend_rows,
    attend_stack,
    attend_tiles,
    merge_tiles,
    merge_two,
    pack_queries,
    stacks_exactly,
)
from quire.attention.torch_plan import (
    TILE_TOKENS,
    ChunkTile,
    DecodePiece,
    GroupPlan,
    PageGeometry,
    PlanKey,
    SharedPiece,
    plan_group,
)
from quire.errors import ConfigurationError
from quire.kernels.rotary import Rotation, rotate

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


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """A plan, and where its decode tiles go until they are merged: layer after layer overwrites it.

    sizes: how many items each piece of the plan yields, stack by stack. parts: views of `tiles` for
        each of them.
    """

    plan: GroupPlan
    sizes: list[list[int]]
    tiles: TileParts
    parts: list[list[TileParts]]

    @staticmethod
    def of(
        key: PlanKey, batch: AttentionBatch, workspace: _Workspace, last: "_PlannedStep | None"
    ) -> "_PlannedStep":
        """last: the key's step before; its views serve again if the sizes are the same, as they
        are in most steps of a few rows: they cost 30 us (AMD EPYC, one core)."""
        plan = plan_group(key, batch)
        num_kv_heads = key.geometry.num_kv_heads
        sizes = [[n * num_kv_heads for n in piece.num_row_tiles()] for piece in plan.pieces]
        if last is not None and last.sizes == sizes:
            return _PlannedStep(plan, sizes, last.tiles, last.parts)
        shape = key.num_heads // num_kv_heads, key.geometry.row // num_kv_heads
        buffer = workspace.take(TileParts.num_elements(len(plan.item_rows), *shape))
        tiles = TileParts.over(buffer, *shape)
        views = iter(tiles.split(list(chain.from_iterable(sizes))))
        parts = [list(islice(views, len(stacks))) for stacks in sizes]
        return _PlannedStep(plan, sizes, tiles, parts)


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
        self.key = PlanKey(
            layer.group, spec.num_heads, spec.window, spec.causal, materialized, geometry
        )
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
        self._steps: dict[PlanKey, _PlannedStep] = {}
        self._slots: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._workspaces: dict[torch.dtype, _Workspace] = {}
        self._results = _Workspace(torch.float32, torch.device("cpu"))
        self._num_tokens = self._num_decodes = 0

    @classmethod
    def create(cls, request: BackendRequest) -> AttentionBackend:
        if request.batch_invariant:
            raise ConfigurationError(
                "attention backend 'torch' can't obey batch_invariant=True: how torch sums up a"
                " prompt depends on its chunks; choose 'native' on a CPU and 'triton' on a GPU"
            )
        return cls()

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> KVPageFormat:
        return plain_page_format(spec, block_size, dtype, KV_DTYPES)

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        pairs = zip(specs, layers, strict=True)
        self._layers = tuple(_BoundLayer(spec, layer) for spec, layer in pairs)
        self._steps = {}
        for bound in self._layers:
            device = bound.pool.device
            for dtype in (bound.pool.dtype, torch.float32):
                self._workspaces.setdefault(dtype, _Workspace(dtype, device))
            self._results = _Workspace(torch.float32, device)

    def plan(self, batch: AttentionBatch) -> None:
        self._num_tokens = sum(batch.query_lens_list)
        self._num_decodes = batch.num_decodes
        keys = {bound.key for bound in self._layers}
        self._steps = {
            key: _PlannedStep.of(key, batch, self._results, self._steps.get(key)) for key in keys
        }
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
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        bound = self._layers[layer]
        assert q.shape[0] == self._num_tokens, "run serves the step that was planned"
        assert (sinks is not None) == bound.spec.has_sinks
        if rotation is not None:
            q, k = rotate(q, k, rotation)
        slots = self._slots[bound.group, bound.block_size]
        bound.keys[slots] = k.to(bound.keys.dtype)
        bound.values[slots] = v.to(bound.values.dtype)
        step = self._steps[bound.key]
        wide_q = q.float()
        parts = [self._decode(bound, step, wide_q)] if step.plan.pieces else []
        parts += [self._chunk(bound, tile, wide_q) for tile in step.plan.chunks]
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if sinks is not None:
            out, lse = add_sinks((out, lse), sinks)
        return out.to(q.dtype)

    def _decode(self, bound: _BoundLayer, step: _PlannedStep, q: torch.Tensor) -> Part:
        """All decode rows of q [T, Hq, D] -> [num_decodes, Hq, D], [num_decodes, Hq]."""
        spec = bound.spec
        q = q[: self._num_decodes] * spec.scale
        packed = pack_queries(q, spec.num_kv_heads)
        for piece, parts in zip(step.plan.pieces, step.parts, strict=True):
            if isinstance(piece, SharedPiece):
                self._attend_shared(bound, piece, q, parts)
            else:
                self._attend_own(bound, piece, packed, parts[0])
        num_rows = self._num_decodes * spec.num_kv_heads
        out, lse = merge_tiles(step.tiles, step.plan.item_rows, num_rows)
        return out.view_as(q), lse.view(q.shape[:2])

    def _attend_own(
        self, bound: _BoundLayer, piece: DecodePiece, q: torch.Tensor, out: TileParts
    ) -> None:
        """q: as packed, of all decode rows."""
        num_tiles = piece.rows.shape[0]
        k, v = self._gather(bound, piece.grains, num_tiles * TILE_TOKENS, piece.garbage)
        k, v = (x.view(num_tiles, TILE_TOKENS, -1) for x in (k, v))
        queries = q.index_select(0, piece.rows)
        attend_tiles(queries, k, v, piece.mask, bound.spec.soft_cap, out)

    def _attend_shared(
        self, bound: _BoundLayer, piece: SharedPiece, q: torch.Tensor, outs: list[TileParts]
    ) -> None:
        """q: scaled, of all decode rows."""
        k, v = self._gather(bound, piece.grains, piece.num_tiles * TILE_TOKENS)
        k, v = (x.view(piece.num_tiles, TILE_TOKENS, -1) for x in (k, v))
        spec = bound.spec
        shape = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        for rows, out in zip(piece.stacks, outs, strict=True):
            is_exact = stacks_exactly(len(rows), *shape, torch.get_num_threads())
            attend = attend_stack if is_exact else attend_rows
            attend(q.index_select(0, rows).view(-1, *shape), k, v, spec.soft_cap, out)

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
