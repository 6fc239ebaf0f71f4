"""Attention over the paged KV cache in plain torch: the fallback.

Serves where there are no native kernels, and as a check of the others. A layer's page is [2, B,
Hkv, D], K then V, in the KV dtype. Blocks are gathered and attended by torch's fused attention in
fp32. Decoding sequences are cut into tiles of TILE_TOKENS keys, many of which are attended in one
call, whatever sequences they belong to; blocks that several of them share (`shared_prefix.py`) are
attended in one call for all. A chunk takes two calls: what precedes it, and itself. Results over
parts of the keys are merged by their log-sum-exps:
out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))).

A sequence that decodes and shares no block gets the same bits alone and beside others. Otherwise
results agree to fp32 rounding: how torch cuts a sum depends on the shapes and on the threads.
Page memory that belongs to no visible token is never multiplied: it may hold NaN. Built by
`backends.py`.

Shapes as in `interface.py`; m query tokens and l keys that are attended together, G = Hq / Hkv.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
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
from quire.attention.shared_prefix import DecodeRows, Ints, SharedTiles, shared_runs
from quire.errors import ConfigurationError
from quire.kernels.rotary import Rotation, rotate

Table = npt.NDArray[np.int32]

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TILE_TOKENS = 64
"""Keys of a decoding sequence that are one item of a call: on average half of it is padding."""

PIECE_BYTES = 4 << 20
"""Of K and V in fp32 that are gathered at once for decoding: much more leaves the caches, and the
allocator maps and unmaps large buffers each time."""

SPAN_TOKENS = 2048
"""Keys before a chunk, or of a shared run, that are gathered and attended at once."""

MIN_SAVED_BYTES = 1 << 20
"""Of K and V in fp32 that a shared run must save; to attend one costs as much as half of it."""

MASKED_CHUNK_TOKENS = 256
"""Queries of a chunk that are attended at once where a mask hides keys or scores are capped: both
take memory for each pair of query and key."""

_NEVER = float("-inf")

Part = tuple[torch.Tensor, torch.Tensor]
"""Outputs [..., D] over some of the keys, normalized, and their log-sum-exps [...]; fp32."""


@dataclass(frozen=True, slots=True)
class _DecodeTiles:
    """n tiles of decoding sequences.

    rows: [n] whose they are. blocks: one after the other, for each unit of TILE_TOKENS, or of a
    block where that is less. units: their places in the blocks; None: they are whole blocks.
    hidden: slots of n * TILE_TOKENS that hold no visible token, and mask [n, 1, TILE_TOKENS], -inf
    for these; None: there are none.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    units: torch.Tensor | None
    hidden: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _KVSpan:
    """Keys that queries attend at once: tokens [first, last) of those in `blocks`.

    is_causal: query i sees the keys up to i. mask: [m, l] fp32, added to the scores.
    """

    blocks: torch.Tensor
    first: int
    last: int
    is_causal: bool = False
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    """Of a step. decodes: what all decoding sequences see; runs: of rows [m], what they share.
    chunks: query tokens of the step and what they see; each sees some of every span.
    """

    decodes: list[_DecodeTiles]
    runs: list[tuple[torch.Tensor, tuple[_KVSpan, ...]]]
    chunks: list[tuple[slice, tuple[_KVSpan, ...]]]


@dataclass(frozen=True, slots=True)
class _View:
    """What the plan of a layer depends on; layers with equal ones share it."""

    group: int
    block_size: int
    window: int | None
    is_causal: bool
    has_cap: bool
    token_bytes: int

    @property
    def unit_tokens(self) -> int:
        """Of what is gathered for tiles: never parts of several blocks."""
        return min(self.block_size, TILE_TOKENS)

    def plan(self, batch: AttentionBatch) -> _TorchPlan:
        """All of the step."""
        table = batch.groups[self.group].block_tables.numpy()
        plan = _TorchPlan([], [], [])
        if batch.num_decodes:
            self._plan_decodes(batch, table, plan)
        first = batch.num_decodes
        for index in range(batch.num_decodes, len(batch.query_lens_list)):
            last = first + batch.query_lens_list[index]
            blocks = table[batch.rows_list[index]]
            plan.chunks.extend(self._chunk(first, last, batch.context_lens_list[index], blocks))
            first = last
        return plan

    def _plan_decodes(self, batch: AttentionBatch, table: Table, plan: _TorchPlan) -> None:
        rows = np.array(batch.rows_list[: batch.num_decodes], np.int64)
        high = np.array(batch.context_lens_list[: batch.num_decodes], np.int64)
        low = np.zeros_like(high) if self.window is None else np.maximum(high - self.window, 0)
        size = self.block_size
        min_saved = -(-MIN_SAVED_BYTES // (size * self.token_bytes))
        runs = shared_runs(DecodeRows(table, rows, low, high), size, size, min_saved)
        for run in runs:
            blocks = table[rows[run.rows[0]]]
            spans = self._spans(blocks, run.first_tile * size, run.end_tile * size)
            plan.runs.append((torch.from_numpy(run.rows), spans))
        sequences, first, last = _own_ranges(low, high, runs, size)
        counts = -(-last // TILE_TOKENS) - first // TILE_TOKENS
        of_range = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(of_range)) - np.repeat(np.cumsum(counts) - counts, counts)
        tiles = (first // TILE_TOKENS)[of_range] + number
        first, last, sequences = first[of_range], last[of_range], sequences[of_range]
        most = max(1, PIECE_BYTES // (TILE_TOKENS * self.token_bytes))
        for start in range(0, len(tiles), most):
            part = slice(start, start + most)
            owners = sequences[part]
            tables = DecodeRows(table, rows[owners], first[part], last[part])
            plan.decodes.append(self._tiles(torch.from_numpy(owners), tiles[part], tables))

    def _tiles(self, owners: torch.Tensor, tiles: Ints, visible: DecodeRows) -> _DecodeTiles:
        """visible: of each tile's row, its table and what is attended of it."""
        low, high = visible.low[:, None], visible.high[:, None]
        slots = tiles[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS)
        hidden = (slots < low) | (slots >= high)
        # Units without a visible token are not read: the nearest one that has some is, once more.
        size = self.unit_tokens
        units = np.clip(slots[:, ::size] // size, low // size, (high - 1) // size)
        per_block = self.block_size // size
        blocks = visible.block_table[visible.table_rows[:, None], units // per_block]
        has_hidden = bool(hidden.any())
        mask = np.where(hidden, np.float32(_NEVER), np.float32(0.0))[:, None]
        return _DecodeTiles(
            owners,
            torch.from_numpy(blocks.astype(np.int64).ravel()),
            None if per_block == 1 else torch.from_numpy((units % per_block).ravel()),
            torch.from_numpy(np.flatnonzero(hidden)) if has_hidden else None,
            torch.from_numpy(mask) if has_hidden else None,
        )

    def _chunk(
        self, first: int, last: int, context: int, blocks: Table
    ) -> Iterator[tuple[slice, tuple[_KVSpan, ...]]]:
        """Tokens [first, last) of the step, the last ones of a context."""
        window = None if self.window is None or self.window >= context else self.window
        size = last - first if window is None and not self.has_cap else MASKED_CHUNK_TOKENS
        for start in range(first, last, size):
            end = min(start + size, last)
            low, high = context - last + start, context - last + end  # positions of the queries
            if window is not None:
                first_key = max(0, low - window + 1)
                end_key = high if self.is_causal else min(context, high + window - 1)
                mask = self._window_mask(range(low, high), range(first_key, end_key), window)
                spans: tuple[_KVSpan, ...] = (self._span(blocks, first_key, end_key, mask=mask),)
            elif self.is_causal:
                own = self._span(blocks, low, high, is_causal=True)
                spans = (own, *self._spans(blocks, 0, low))
            else:
                spans = self._spans(blocks, 0, context)
            yield slice(start, end), spans

    def _window_mask(self, queries: range, keys: range, window: int) -> torch.Tensor:
        """[m, l]: -inf where a query, by its position, doesn't see a key, else 0."""
        distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(
            keys.start, keys.stop
        )
        hidden = distance.abs() >= window
        if self.is_causal:
            hidden |= distance < 0
        return torch.zeros(hidden.shape).masked_fill_(hidden, _NEVER)

    def _spans(self, blocks: Table, first: int, last: int) -> tuple[_KVSpan, ...]:
        """All of [first, last), which may be empty."""
        step = max(SPAN_TOKENS, self.block_size)
        edges = [first, *range(first - first % step + step, last, step), last]
        pairs = pairwise(edges)
        return tuple(self._span(blocks, start, end) for start, end in pairs if start < end)

    def _span(
        self,
        blocks: Table,
        first: int,
        last: int,
        *,
        is_causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> _KVSpan:
        """Positions [first, last) of a sequence, which lies in `blocks`."""
        first_block, end_block = first // self.block_size, -(-last // self.block_size)
        ids = torch.from_numpy(blocks[first_block:end_block].astype(np.int64))
        skipped = first_block * self.block_size
        return _KVSpan(ids, first - skipped, last - skipped, is_causal, mask)


def _own_ranges(
    low: Ints, high: Ints, runs: list[SharedTiles], block_size: int
) -> tuple[Ints, Ints, Ints]:
    """What rows don't share of their visible [low, high): rows, and [first, last) for each."""
    before, after = high.copy(), high.copy()
    for run in runs:
        before[run.rows] = np.minimum(before[run.rows], run.first_tile * block_size)
        after[run.rows] = run.end_tile * block_size
    rows = np.tile(np.arange(len(low)), 2)
    first, last = np.concatenate([low, after]), np.concatenate([before, high])
    chosen = np.flatnonzero(first < last)
    return rows[chosen], first[chosen], last[chosen]


class _LayerMemory:
    """A layer with its memory. keys, values: [N, B, Hkv, D], views of the pages."""

    def __init__(self, spec: AttentionSpec, layer: LayerKV) -> None:
        assert layer.pages.dtype == torch.uint8
        assert layer.pages.shape[1] == layer.format.bytes_per_layer
        self.spec = spec
        self.group = layer.group
        self.block_size = layer.format.block_size
        shape = (-1, 2, self.block_size, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = layer.pages.view(layer.format.dtype).view(shape).unbind(1)
        token_bytes = 2 * torch.float32.itemsize * self.keys[0, 0].numel()
        has_cap = spec.soft_cap is not None
        self.view = _View(
            self.group, self.block_size, spec.window, spec.causal, has_cap, token_bytes
        )

    def attend_decodes(self, q: torch.Tensor, plan: _TorchPlan) -> Part:
        """All decoding sequences, q [S, Hq, D] -> [S, Hq, D], [S, Hq]."""
        found = [(tiles.rows, self._attend_tiles(q, tiles)) for tiles in plan.decodes]
        for rows, spans in plan.runs:
            found += [(rows, self._attend_shared(q.index_select(0, rows), s)) for s in spans]
        rows = torch.cat([rows for rows, _ in found])
        out, lse = (torch.cat([part[i] for _, part in found]) for i in (0, 1))
        return _merged_by_row(out, lse, rows, len(q))

    def _attend_tiles(self, q: torch.Tensor, tiles: _DecodeTiles) -> Part:
        """A part for each tile: [n, Hq, D], [n, Hq]."""
        spec, num_tiles = self.spec, len(tiles.rows)
        queries = q.index_select(0, tiles.rows)
        by_head = queries.view(num_tiles, spec.num_kv_heads, -1, spec.head_dim)
        stored = []
        for memory in (self.keys, self.values):
            if tiles.units is None:
                gathered = memory.index_select(0, tiles.blocks)
            else:
                gathered = memory.view(len(memory), -1, TILE_TOKENS, *memory.shape[2:])[
                    tiles.blocks, tiles.units
                ]
            gathered = gathered.view(num_tiles * TILE_TOKENS, -1)
            if tiles.hidden is not None:
                gathered.index_fill_(0, tiles.hidden, 0)
            shape = (num_tiles, TILE_TOKENS, spec.num_kv_heads, spec.head_dim)
            stored.append(gathered.float().view(shape).transpose(1, 2))
        k, v = stored
        if num_tiles == 1:  # of a single product torch splits the sums among the threads
            by_head, k, v = (x.expand(2, -1, -1, -1) for x in (by_head, k, v))
        # One KV head after the other: products of all of them would copy K and V first.
        found = [
            _attend_products(by_head[:, i], k[:, i], v[:, i], spec.scale, spec.soft_cap, tiles.mask)
            for i in range(spec.num_kv_heads)
        ]
        out, lse = (torch.stack(x, dim=1)[:num_tiles] for x in zip(*found, strict=True))
        return out.reshape(queries.shape), lse.reshape(queries.shape[:2])

    def _attend_shared(self, q: torch.Tensor, span: _KVSpan) -> Part:
        """Decoding sequences that all see all of the keys: q [m, Hq, D] -> [m, Hq, D], [m, Hq]."""
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        grouped = q.view(len(q), num_kv_heads, -1, head_dim).transpose(0, 1)
        k, v = (self._gathered(x, span).transpose(0, 1)[None] for x in (self.keys, self.values))
        out, lse = self._attend(grouped.flatten(1, 2)[None], k, v)
        out, lse = out.reshape(grouped.shape), lse.reshape(grouped.shape[:3])
        return out.transpose(0, 1).reshape(q.shape), lse.transpose(0, 1).reshape(q.shape[:2])

    def attend_chunk(self, q: torch.Tensor, spans: tuple[_KVSpan, ...]) -> Part:
        """q [m, Hq, D] -> [m, Hq, D], [m, Hq]."""
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        queries = q.view(len(q), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        merged: Part | None = None
        for span in spans:
            k, v = (
                self._gathered(x, span)
                .transpose(0, 1)[:, None]
                .expand(-1, queries.shape[1], -1, -1)
                for x in (self.keys, self.values)
            )
            part = self._attend(queries, k, v, span.mask, is_causal=span.is_causal)
            merged = part if merged is None else _merged(merged, part)
        assert merged is not None, "a query sees at least its own key"
        out, lse = merged
        return out.permute(2, 0, 1, 3).reshape(q.shape), lse.permute(2, 0, 1).reshape(q.shape[:2])

    def _gathered(self, memory: torch.Tensor, span: _KVSpan) -> torch.Tensor:
        """The span's keys or values, [l, Hkv, D] fp32; a view where they lie in one block."""
        if len(span.blocks) == 1:
            return memory[span.blocks[0], span.first : span.last].float()
        return memory.index_select(0, span.blocks).flatten(0, 1)[span.first : span.last].float()

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Part:
        """q [b, h, m, D], k and v [b, h, l, D] -> [b, h, m, D], [b, h, m]. mask: broadcast to the
        scores [b, h, m, l] and added; each query sees a key."""
        scale, cap = self.spec.scale, self.spec.soft_cap
        if cap is not None:
            return _attend_products(q, k, v, scale, cap, mask, is_causal=is_causal)
        # What `scaled_dot_product_attention` calls; that doesn't return log-sum-exps.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, lse


def _attend_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    cap: float | None,
    mask: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> Part:
    """As `_LayerMemory._attend`, of any leading dimensions; the scores [.., m, l] are in memory."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if is_causal:
        scores += torch.full(scores.shape[-2:], _NEVER).triu_(1)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v), lse


def _merged(first: Part, second: Part) -> Part:
    """Of the same queries over disjoint keys."""
    lse = torch.logaddexp(first[1], second[1])
    out = first[0] * (first[1] - lse).exp_()[..., None]
    out += second[0] * (second[1] - lse).exp_()[..., None]
    return out, lse


def _merged_by_row(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, count: int) -> Part:
    """Parts out [n, Hq, D], lse [n, Hq], of rows [n] -> [count, Hq, D], [count, Hq]. A row's parts
    are added in their order, whatever lies between them. out is overwritten."""
    peak = lse.new_full((count, lse.shape[1]), _NEVER)
    peak.scatter_reduce_(0, rows[:, None].expand_as(lse), lse, "amax")
    weights = (lse - peak[rows]).exp_()
    mass = torch.zeros_like(peak).index_add_(0, rows, weights)
    total = out.new_zeros(count, *out.shape[1:])
    total.index_add_(0, rows, out.mul_(weights[..., None]))
    return total.div_(mass[..., None]), mass.log_().add_(peak)


class TorchPagedAttention(AttentionBackend):
    """See the module's text. Between `plan` and the step's last `run` the batch stays unchanged."""

    def __init__(self) -> None:
        self._layers: tuple[_LayerMemory, ...] = ()
        self._plans: dict[_View, _TorchPlan] = {}
        self._slots: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
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
        self._layers = tuple(map(_LayerMemory, specs, layers))
        self._plans = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._num_tokens = sum(batch.query_lens_list)
        self._num_decodes = batch.num_decodes
        self._plans = {view: view.plan(batch) for view in {bound.view for bound in self._layers}}
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
        plan, wide_q = self._plans[bound.view], q.float().contiguous()
        parts = [bound.attend_chunk(wide_q[tokens], spans) for tokens, spans in plan.chunks]
        if self._num_decodes:
            parts.insert(0, bound.attend_decodes(wide_q[: self._num_decodes], plan))
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if sinks is not None:  # a learned score per head, whose value is zero
            out = out * torch.sigmoid(lse - sinks.float())[..., None]
        return out.to(q.dtype)
