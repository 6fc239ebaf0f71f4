"""Attention over the paged KV cache in plain torch: the fallback.

Serves where there are no native kernels, and as a check of the others. A layer's page is [2, B,
Hkv, D], K then V, in the KV dtype. A latent layer's is [B, D]: torch's attention, which knows one
head size, is given all of it as values, and the first Dv elements of their means count.

A step is a list of calls: each gathers blocks and attends them by torch's fused attention in fp32.
Decoding sequences are cut into tiles, many of which make one call, whatever sequences they belong
to; blocks that several of them share (`shared_prefix.py`) are attended in one call for all. A chunk
takes two calls: what precedes it, and itself. Results over parts of the keys are merged by their
log-sum-exps:
out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i))).

A sequence that decodes and shares no block gets the same bits alone and beside others. Otherwise
results agree to fp32 rounding: how torch cuts a sum depends on the shapes and on the threads.
Page memory that belongs to no visible token is never multiplied: it may hold NaN. Built by
`backends.py`.

Shapes as in `interface.py`; n tiles, each of m query tokens and l keys, G = Hq / Hkv.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.compact_kv import (
    SCALE_DTYPE,
    quantize_vectors,
    rotate_vectors,
    widen_codes,
    with_scales,
)
from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    KVPageFormat,
    LayerKV,
    plain_page_format,
    rotated,
)
from quire.attention.shared_prefix import DecodeRows, Ints, SharedTiles, shared_runs
from quire.errors import ConfigurationError
from quire.kernels.rotary import Rotation

Table = npt.NDArray[np.int32]

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

TILE_TOKENS = 64
"""Keys of a decoding sequence that are one tile, or a block if that is more: on average half of a
tile is padding."""

PIECE_BYTES = 4 << 20
"""Of K and V in fp32 that one call gathers for tiles: much more leaves the caches."""

SPAN_TOKENS = 2048
"""Keys before a chunk, or of a shared run, that are gathered and attended at once."""

MIN_SAVED_BYTES = 1 << 20
"""Of K and V in fp32 that a shared run must save; to attend one costs as much as half of it."""

MASKED_CHUNK_TOKENS = 256
"""Queries of a chunk that are attended at once where a mask hides keys or scores are capped: both
take memory for each pair of query and key."""

ALIGNED_ROWS = 8
"""To a multiple of it the query heads of a KV head are padded where a sequence decodes."""

_NEVER = float("-inf")

Part = tuple[torch.Tensor, torch.Tensor]
"""Outputs [..., D] over some of the keys, normalized, and their log-sum-exps [...]; fp32."""


@dataclass(frozen=True, slots=True)
class _Call:
    """n tiles that are attended at once: of one query token each, or a single tile of m.

    tokens: [n, m] the queries' places in the step. blocks: those of the tiles, one after the other;
    a tile's keys are its slots [first, end). hidden: slots of all tiles that no query sees.
    mask: added to the scores, [n, 1, 1, l] or [m, l]. is_causal: query i sees the keys up to i.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    first: int = 0
    end: int | None = None
    hidden: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of a step. tokens: whose parts the calls yield, in their order; None: those of each once."""

    calls: list[_Call]
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _View:
    """What the plan of a layer depends on; layers with equal ones share it."""

    group: int
    block_size: int
    window: int | None
    is_causal: bool
    has_cap: bool
    token_bytes: int

    def plan(self, batch: AttentionBatch) -> _Plan:
        """All of the step."""
        table = batch.groups[self.group].block_tables.numpy()
        calls = list(self._decodes(batch, table)) if batch.num_decodes else []
        first = batch.num_decodes
        for index in range(batch.num_decodes, len(batch.query_lens_list)):
            last = first + batch.query_lens_list[index]
            blocks = table[batch.rows_list[index]]
            calls.extend(self._chunk(first, last, batch.context_lens_list[index], blocks))
            first = last
        tokens = torch.cat([call.tokens.flatten() for call in calls])
        return _Plan(calls, None if torch.equal(tokens, torch.arange(first)) else tokens)

    def _decodes(self, batch: AttentionBatch, table: Table) -> Iterator[_Call]:
        rows = np.array(batch.rows_list[: batch.num_decodes], np.int64)
        high = np.array(batch.context_lens_list[: batch.num_decodes], np.int64)
        low = np.zeros_like(high) if self.window is None else np.maximum(high - self.window, 0)
        size = self.block_size
        min_saved = -(-MIN_SAVED_BYTES // (size * self.token_bytes))
        runs = shared_runs(DecodeRows(table, rows, low, high), size, size, min_saved)
        for run in runs:
            blocks = table[rows[run.rows[0]]]
            tokens = torch.from_numpy(run.rows)
            yield from self._spans(tokens, blocks, run.first_tile * size, run.end_tile * size)
        sequences, first, last = _own_ranges(low, high, runs, size)
        tile_tokens = max(TILE_TOKENS, size)
        start = first // size * size
        counts = -(-(last - start) // tile_tokens)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = (start[owner] + number * tile_tokens)[:, None] + np.arange(tile_tokens)
        hidden = (slots < first[owner, None]) | (slots >= last[owner, None])
        # Blocks without a visible token are not read: the last one that has some is, once more.
        units = np.minimum(slots[:, ::size], last[owner, None] - 1) // size
        blocks = table[rows[sequences[owner], None], units].astype(np.int64)
        most = max(1, PIECE_BYTES // (tile_tokens * self.token_bytes))
        for begin in range(0, len(owner), most):
            part = slice(begin, begin + most)
            yield _tiles(sequences[owner[part]], blocks[part], hidden[part])

    def _chunk(self, first: int, last: int, context: int, blocks: Table) -> Iterator[_Call]:
        """Tokens [first, last) of the step, the last ones of a context."""
        window = None if self.window is None or self.window >= context else self.window
        size = last - first if window is None and not self.has_cap else MASKED_CHUNK_TOKENS
        for start in range(first, last, size):
            tokens = torch.arange(start, min(start + size, last))
            low = context - last + start  # positions of the queries
            high = low + len(tokens)
            if window is not None:
                first_key = max(0, low - window + 1)
                end_key = high if self.is_causal else min(context, high + window - 1)
                mask = self._window_mask(range(low, high), range(first_key, end_key), window)
                yield self._call(tokens, blocks, first_key, end_key, mask=mask)
            elif self.is_causal:
                yield self._call(tokens, blocks, low, high, is_causal=True)
                yield from self._spans(tokens, blocks, 0, low)
            else:
                yield from self._spans(tokens, blocks, 0, context)

    def _window_mask(self, queries: range, keys: range, window: int) -> torch.Tensor:
        """[m, l]: -inf where a query, by its position, doesn't see a key, else 0."""
        distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(
            keys.start, keys.stop
        )
        hidden = distance.abs() >= window
        if self.is_causal:
            hidden |= distance < 0
        return torch.zeros(hidden.shape).masked_fill_(hidden, _NEVER)

    def _spans(self, tokens: torch.Tensor, blocks: Table, first: int, last: int) -> Iterator[_Call]:
        """All of [first, last), which may be empty."""
        step = max(SPAN_TOKENS, self.block_size)
        edges = [*range(first, last, step), last]
        return (self._call(tokens, blocks, start, end) for start, end in pairwise(edges))

    def _call(
        self,
        tokens: torch.Tensor,
        blocks: Table,
        first: int,
        last: int,
        *,
        is_causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> _Call:
        """Positions [first, last) of a sequence, which lies in `blocks`."""
        first_block, end_block = first // self.block_size, -(-last // self.block_size)
        ids = torch.from_numpy(blocks[first_block:end_block].astype(np.int64))
        skipped = first_block * self.block_size
        return _Call(
            tokens[None], ids, first - skipped, last - skipped, mask=mask, is_causal=is_causal
        )


def _tiles(sequences: Ints, blocks: Ints, hidden: npt.NDArray[np.bool_]) -> _Call:
    """sequences: [n] whose tiles they are. blocks: [n, any]. hidden: [n, l]."""
    tokens, ids = torch.from_numpy(sequences)[:, None], torch.from_numpy(blocks.ravel())
    if not hidden.any():
        return _Call(tokens, ids)
    mask = np.where(hidden, np.float32(_NEVER), np.float32(0.0))[:, None, None]
    slots = torch.from_numpy(np.flatnonzero(hidden))
    return _Call(tokens, ids, hidden=slots, mask=torch.from_numpy(mask))


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


@dataclass(frozen=True, slots=True)
class _Stored:
    """K or V of a layer. vectors: [N, B, Hkv, D], a view of the pages; scales: [N, B, Hkv] where
    these are codes."""

    vectors: torch.Tensor
    scales: torch.Tensor | None

    def write(self, slots: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> None:
        """x [T, Hkv, D] goes to the blocks and offsets of slots."""
        if self.scales is None:
            self.vectors[slots] = x.to(self.vectors.dtype)
        else:
            self.vectors[slots], self.scales[slots] = quantize_vectors(x)

    def gather(self, call: _Call) -> torch.Tensor:
        """The call's keys or values, [n, Hkv, l, D] fp32."""
        stored = self.vectors.index_select(0, call.blocks).flatten(0, 1)
        if self.scales is not None:
            stored = widen_codes(stored, self.scales.index_select(0, call.blocks).flatten(0, 1))
        if call.hidden is not None:
            stored.index_fill_(0, call.hidden, 0)
        tiles = stored.view(len(call.tokens), -1, *stored.shape[1:])
        return tiles[:, call.first : call.end].float().transpose(1, 2)


def _stored_parts(spec: AttentionSpec, layer: LayerKV) -> list[_Stored]:
    """K, and V where it is stored."""
    num_parts = 1 if spec.value_dim else 2
    heads = (num_parts, layer.format.block_size, spec.num_kv_heads)
    if layer.format.dtype != torch.int8:
        vectors = layer.pages.view(layer.format.dtype).view(-1, *heads, spec.head_dim)
        return [_Stored(part, None) for part in vectors.unbind(1)]
    num_codes = math.prod(heads) * spec.head_dim
    codes = layer.pages[:, :num_codes].view(torch.int8).view(-1, *heads, spec.head_dim)
    scales = layer.pages[:, num_codes:].view(SCALE_DTYPE).view(-1, *heads)
    return list(map(_Stored, codes.unbind(1), scales.unbind(1)))


class _LayerMemory:
    """A layer with its memory. values: None in latent layers."""

    def __init__(self, spec: AttentionSpec, layer: LayerKV) -> None:
        assert layer.pages.dtype == torch.uint8
        assert layer.pages.shape[1] == layer.format.bytes_per_layer
        self.spec = spec
        self.group = layer.group
        self.block_size = layer.format.block_size
        self.is_rotated = layer.format.dtype == torch.int8 and spec.value_dim is None
        parts = _stored_parts(spec, layer)
        self.keys, self.values = parts[0], None if spec.value_dim else parts[1]
        token_bytes = 2 * torch.float32.itemsize * spec.num_kv_heads * spec.head_dim
        has_cap = spec.soft_cap is not None
        self.view = _View(
            self.group, self.block_size, spec.window, spec.causal, has_cap, token_bytes
        )

    def attend(self, q: torch.Tensor, call: _Call) -> Part:
        """q of the step -> [n * m, Hq, Dv], [n * m, Hq]."""
        out, lse = self._attend_call(q, call)
        return out[..., : self.spec.output_dim], lse

    def store(
        self, slots: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor | None
    ) -> None:
        """Write the step's k and v; slots: the block and the offset of each token."""
        self.keys.write(slots, rotate_vectors(k) if self.is_rotated else k)
        if self.values is not None:
            assert v is not None, "a layer that is not latent is called with values"
            self.values.write(slots, self.spec.with_zeros(v))

    def _attend_call(self, q: torch.Tensor, call: _Call) -> Part:
        """As `attend`, with all of D in the outputs."""
        count, m = call.tokens.numel(), call.tokens.shape[1]
        queries = q.index_select(0, call.tokens.flatten())
        grouped = queries.view(count, self.spec.num_kv_heads, -1, self.spec.head_dim)
        k = self.keys.gather(call)
        v = k if self.values is None else self.values.gather(call)
        if m == 1:
            # How torch sums depends on how its buffers are aligned; each thread has its own, one
            # behind the other, of m * (l + D + 2) floats: with m a multiple of ALIGNED_ROWS all
            # begin at a multiple of 64 bytes. The sums of a single tile it splits among threads.
            group_size = grouped.shape[2]
            grouped = torch.nn.functional.pad(grouped, (0, 0, 0, -group_size % ALIGNED_ROWS))
            if count == 1:
                grouped, k, v = (x.expand(2, -1, -1, -1) for x in (grouped, k, v))
            out, lse = (x[:count, :, :group_size] for x in self._attend(grouped, k, v, call))
            return out.reshape(queries.shape), lse.reshape(queries.shape[:2])
        # A query head after the other takes its KV head's keys, which are not copied for it.
        k, v = (x[0, :, None].expand(-1, grouped.shape[2], -1, -1) for x in (k, v))
        out, lse = self._attend(grouped.permute(1, 2, 0, 3), k, v, call)
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
        return out.reshape(queries.shape), lse.reshape(queries.shape[:2])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> Part:
        """q [b, h, m, D], k and v [b, h, l, D] -> [b, h, m, D], [b, h, m]."""
        scale, cap = self.spec.scale, self.spec.soft_cap
        if cap is None:
            # What `scaled_dot_product_attention` calls; that doesn't return log-sum-exps.
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, call.is_causal, attn_mask=call.mask, scale=scale
            )
            return out, lse
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
        scores.div_(cap).tanh_().mul_(cap)
        if call.is_causal:
            scores += torch.full(scores.shape[-2:], _NEVER).triu_(1)
        if call.mask is not None:
            scores += call.mask
        lse = torch.logsumexp(scores, dim=-1)
        return torch.matmul(scores.sub_(lse[..., None]).exp_(), v), lse


def _merged(out: torch.Tensor, lse: torch.Tensor, tokens: torch.Tensor, count: int) -> Part:
    """Parts out [p, Hq, D], lse [p, Hq], of tokens [p] -> [count, Hq, D], [count, Hq]. A token's
    parts are added in their order, whatever lies between them. out is overwritten."""
    peak = lse.new_full((count, lse.shape[1]), _NEVER)
    peak.scatter_reduce_(0, tokens[:, None].expand_as(lse), lse, "amax")
    weights = (lse - peak[tokens]).exp_()
    mass = torch.zeros_like(peak).index_add_(0, tokens, weights)
    total = out.new_zeros(count, *out.shape[1:])
    total.index_add_(0, tokens, out.mul_(weights[..., None]))
    return total.div_(mass[..., None]), mass.log_().add_(peak)


class TorchPagedAttention(AttentionBackend):
    """See the module's text. Between `plan` and the step's last `run` the batch stays unchanged."""

    def __init__(self) -> None:
        self._layers: tuple[_LayerMemory, ...] = ()
        self._plans: dict[_View, _Plan] = {}
        self._slots: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_tokens = 0

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
        form = plain_page_format(spec, block_size, dtype, KV_DTYPES)
        return with_scales(spec, form) if dtype == torch.int8 else form

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        self._layers = tuple(map(_LayerMemory, specs, layers))
        self._plans = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._num_tokens = sum(batch.query_lens_list)
        self._plans = {view: view.plan(batch) for view in {bound.view for bound in self._layers}}
        self._slots = {}
        for group, block_size in {(b.group, b.block_size) for b in self._layers}:
            slots = batch.groups[group].slot_mapping
            self._slots[group, block_size] = (slots // block_size, slots % block_size)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        bound = self._layers[layer]
        assert q.shape[0] == self._num_tokens, "run serves the step that was planned"
        assert (sinks is not None) == bound.spec.has_sinks
        assert rotation is None or bound.spec.value_dim is None, "models of latent layers turn q, k"
        q, k = rotated(q, k, rotation)
        if k is not None:
            bound.store(self._slots[bound.group, bound.block_size], k, v)
        plan = self._plans[bound.view]
        wide_q = (rotate_vectors(q) if bound.is_rotated else q.float()).contiguous()
        parts = [bound.attend(wide_q, call) for call in plan.calls]
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if plan.tokens is not None:
            out, lse = _merged(out, lse, plan.tokens, len(q))
        if sinks is not None:  # a learned score per head, whose value is zero
            out = out * torch.sigmoid(lse - sinks.float())[..., None]
        return out.to(q.dtype)
