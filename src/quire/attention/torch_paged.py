"""Attention over the paged KV cache in plain torch: the fallback.

It is used if there are no native kernels, and tests compare the other backends with it. It reads
any KV format. A layer's page has the arrays of the format's keys, [B, Hkv, *shape] each, and then
its values' arrays. A latent layer's page has only keys. Torch's attention gets all D elements of
the keys as values, and the first Dv elements of the result are used.

A step is a list of calls, each of which gathers blocks and attends to them in fp32. The keys of
decoding sequences are split into tiles, and a call has tiles of many sequences. Blocks that several
sequences share (`shared_prefix.py`) are read in one call for all of them. A chunk of a prompt takes
one call for the tokens before it and one for its own tokens. Results over parts of the keys are
merged by their log-sum-exps:

    out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i)))

A decoding sequence that shares no block gets the same bits in every batch. Other results agree up
to fp32 rounding, since torch's order of summation depends on shapes and threads. Slots without a
visible token may hold NaN, so they are never multiplied.

Shapes as in `interface.py`; n tiles, each of m query tokens and l keys, G = Hq / Hkv.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BackendRequest,
    LayerKV,
    rotated,
)
from quire.attention.kv_format import VectorFormat, rotate_vectors
from quire.attention.shared_prefix import DecodeRows, Ints, SharedTiles, shared_runs
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

Table = npt.NDArray[np.int32]

TILE_TOKENS = 64
"""The number of keys in a tile, unless a block has more. On average half of a sequence's last tile
is padding."""

PIECE_BYTES = 4 << 20
"""The bytes of K and V in fp32 that a call gathers for tiles. Much more doesn't fit the caches."""

SPAN_TOKENS = 2048
"""The largest number of keys before a chunk, or in a shared run, that one call reads."""

MIN_SAVED_BYTES = 1 << 20
"""The bytes of K and V in fp32 that a shared run must save. A run costs as much time as reading
half of these bytes."""

MASKED_CHUNK_TOKENS = 256
"""The largest number of a chunk's queries in one call with a mask or a cap of scores. Masks and
caps take memory for each pair of query and key."""

ALIGNED_ROWS = 8
"""The query heads of a KV head are padded to a multiple of this if a sequence decodes."""

_NEVER = float("-inf")

Part = tuple[torch.Tensor, torch.Tensor]
"""Normalized outputs [..., D] over some of the keys, and their log-sum-exps [...]; fp32."""


@dataclass(frozen=True, slots=True)
class _Call:
    """n tiles that are computed at once: tiles of one query token each, or one tile of m tokens."""

    #: [n, m], the queries' indices in the step.
    tokens: torch.Tensor
    #: The ids of the tiles' blocks, one tile after the other.
    blocks: torch.Tensor
    #: A tile's keys are the slots [first, end) of its blocks. If `end` is None, they reach to the
    #: last slot.
    first: int = 0
    end: int | None = None
    #: Indices of slots hidden from all queries, counted over all tiles; None without such slots.
    hidden: torch.Tensor | None = None
    #: [n, 1, 1, l] or [m, l], added to the scores.
    mask: torch.Tensor | None = None
    #: Whether query i sees only the keys up to i.
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls of a step."""

    calls: list[_Call]
    #: The token that each partial result of the calls belongs to; None if the calls return each
    #: token once, in order.
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _View:
    """The properties of a layer that determine its plan. Layers with equal views share a plan."""

    group: int
    block_size: int
    window: int | None
    is_causal: bool
    sees_ahead: bool
    has_cap: bool
    #: The bytes of a token's K and V in fp32.
    token_bytes: int

    def plan(self, batch: AttentionBatch) -> _Plan:
        """The plan of a whole step."""
        table = batch.groups[self.group].block_tables.numpy()
        calls = list(self._decodes(batch, table)) if batch.num_decodes else []
        first = batch.num_decodes
        for index in range(batch.num_decodes, len(batch.query_lens_list)):
            last = first + batch.query_lens_list[index]
            blocks, context = table[batch.rows_list[index]], batch.context_lens_list[index]
            for start, end, is_causal in self._parts(batch, first, last, context):
                part = replace(self, is_causal=is_causal)
                calls.extend(part._chunk(start, end, context - last + end, blocks))
            first = last
        tokens = torch.cat([call.tokens.flatten() for call in calls])
        return _Plan(calls, None if torch.equal(tokens, torch.arange(first)) else tokens)

    def _parts(
        self, batch: AttentionBatch, first: int, last: int, context: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Cuts the step's tokens [first, last), which are the last of `context` tokens, at the
        edges of contents: (first token, last token, whether the part's queries are causal)."""
        ends = batch.visible_ends
        if ends is None or not self.sees_ahead:
            yield first, last, self.is_causal
            return
        positions = torch.arange(context - last + first, context)
        is_ahead = ends[first:last] > positions + 1
        start = first
        for token in (first + is_ahead.nonzero().flatten()).tolist():
            if token < start:
                continue  # it is in a part that was returned
            if token > start:
                yield start, token, True
            start = token + int(ends[token]) - (context - last + token)
            yield token, start, False
        if start < last:
            yield start, last, True

    def _decodes(self, batch: AttentionBatch, table: Table) -> Iterator[_Call]:
        rows = np.array(batch.rows_list[: batch.num_decodes], np.int64)
        high = np.array(batch.context_lens_list[: batch.num_decodes], np.int64)
        low = np.zeros_like(high) if self.window is None else np.maximum(high - self.window, 0)
        size = self.block_size
        # First, the blocks that sequences share.
        min_saved = -(-MIN_SAVED_BYTES // (size * self.token_bytes))
        runs = shared_runs(DecodeRows(table, rows, low, high), size, size, min_saved)
        for run in runs:
            blocks = table[rows[run.rows[0]]]
            tokens = torch.from_numpy(run.rows)
            yield from self._spans(tokens, blocks, run.first_tile * size, run.end_tile * size)
        # Then each sequence's unshared keys, in tiles: for each tile, `owner` is the index in
        # `sequences` of its sequence, and `number` the tile's index within the sequence.
        sequences, first, last = _own_ranges(low, high, runs, size)
        tile_tokens = max(TILE_TOKENS, size)
        start = first // size * size
        counts = -(-(last - start) // tile_tokens)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = (start[owner] + number * tile_tokens)[:, None] + np.arange(tile_tokens)
        hidden = (slots < first[owner, None]) | (slots >= last[owner, None])
        # A tile's blocks after the last visible token are replaced by the last visible block.
        units = np.minimum(slots[:, ::size], last[owner, None] - 1) // size
        blocks = table[rows[sequences[owner], None], units].astype(np.int64)
        most = max(1, PIECE_BYTES // (tile_tokens * self.token_bytes))
        for begin in range(0, len(owner), most):
            part = slice(begin, begin + most)
            yield _tiles(sequences[owner[part]], blocks[part], hidden[part])

    def _chunk(self, first: int, last: int, context: int, blocks: Table) -> Iterator[_Call]:
        """The calls for the step's tokens [first, last), which are the last of `context` tokens."""
        window = None if self.window is None or self.window >= context else self.window
        size = last - first if window is None and not self.has_cap else MASKED_CHUNK_TOKENS
        for start in range(first, last, size):
            tokens = torch.arange(start, min(start + size, last))
            low = context - last + start  # positions of the queries
            high = low + len(tokens)
            if window is not None:
                first_key = max(0, low - window + 1)
                end_key = context
                if self.is_causal:
                    end_key = high
                elif not self.sees_ahead:
                    end_key = min(context, high + window - 1)
                mask = self._window_mask(range(low, high), range(first_key, end_key), window)
                yield self._call(tokens, blocks, first_key, end_key, mask=mask)
            elif self.is_causal:
                yield self._call(tokens, blocks, low, high, is_causal=True)
                yield from self._spans(tokens, blocks, 0, low)
            else:
                yield from self._spans(tokens, blocks, 0, context)

    def _window_mask(self, queries: range, keys: range, window: int) -> torch.Tensor:
        """A mask [m, l]: 0 if the query at its position sees the key, else -inf."""
        distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(
            keys.start, keys.stop
        )
        hidden = distance >= window
        if self.is_causal:
            hidden |= distance < 0
        elif not self.sees_ahead:
            hidden |= -distance >= window
        return torch.zeros(hidden.shape).masked_fill_(hidden, _NEVER)

    def _spans(self, tokens: torch.Tensor, blocks: Table, first: int, last: int) -> Iterator[_Call]:
        """Calls for the keys at positions [first, last); none if the range is empty."""
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
        """A call for the keys at positions [first, last) of a sequence with these blocks."""
        first_block, end_block = first // self.block_size, -(-last // self.block_size)
        ids = torch.from_numpy(blocks[first_block:end_block].astype(np.int64))
        skipped = first_block * self.block_size
        return _Call(
            tokens[None], ids, first - skipped, last - skipped, mask=mask, is_causal=is_causal
        )


def _tiles(sequences: Ints, blocks: Ints, hidden: npt.NDArray[np.bool_]) -> _Call:
    """A call for n tiles, given their sequences [n], blocks [n, any] and hidden slots [n, l]."""
    tokens, ids = torch.from_numpy(sequences)[:, None], torch.from_numpy(blocks.ravel())
    if not hidden.any():
        return _Call(tokens, ids)
    mask = np.where(hidden, np.float32(_NEVER), np.float32(0.0))[:, None, None]
    slots = torch.from_numpy(np.flatnonzero(hidden))
    return _Call(tokens, ids, hidden=slots, mask=torch.from_numpy(mask))


def _own_ranges(
    low: Ints, high: Ints, runs: list[SharedTiles], block_size: int
) -> tuple[Ints, Ints, Ints]:
    """The ranges [first, last) of visible positions that rows don't share: (rows, first, last).

    A row may occur twice, once for the range before its shared runs and once for the range after.
    """
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
    """The stored K or V of a layer."""

    form: VectorFormat
    #: The format's arrays, [N, B, Hkv, *shape] each, views of the pages.
    arrays: list[torch.Tensor]

    def write(self, slots: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> None:
        """Write x [T, Hkv, D] to the slots, given as (block ids, offsets in the blocks)."""
        for array, part in zip(self.arrays, self.form.encode(x), strict=True):
            array[slots] = part

    def gather(self, call: _Call) -> torch.Tensor:
        """The call's keys or values, [n, Hkv, l, D] fp32."""
        count, seen = len(call.tokens), slice(call.first, call.end)
        gathered = [array.index_select(0, call.blocks) for array in self.arrays]
        tiles = [part.view(count, -1, *part.shape[2:])[:, seen] for part in gathered]
        vectors = self.form.decode(*tiles)
        if call.hidden is not None:
            vectors.view(-1, *vectors.shape[2:]).index_fill_(0, call.hidden, 0)
        return vectors.transpose(1, 2)


def _stored(spec: AttentionSpec, layer: LayerKV) -> list[_Stored]:
    """K, and V if it is stored."""
    heads, start = (layer.format.block_size, spec.num_kv_heads), 0
    found = []
    for form in layer.format.kv_format.vectors(is_latent=spec.value_dim is not None):
        arrays = []
        for dtype, shape in form.arrays(spec.head_dim):
            end = start + math.prod((*heads, *shape)) * dtype.itemsize
            arrays.append(layer.pages[:, start:end].view(dtype).view(-1, *heads, *shape))
            start = end
        found.append(_Stored(form, arrays))
    return found


class _LayerMemory:
    """A layer with its memory."""

    def __init__(self, spec: AttentionSpec, layer: LayerKV) -> None:
        assert layer.pages.dtype == torch.uint8
        assert layer.pages.shape[1] == layer.format.bytes_per_layer
        self.spec = spec
        self.group = layer.group
        self.block_size = layer.format.block_size
        self.is_rotated = layer.format.kv_format.rotates_keys and spec.value_dim is None
        parts = _stored(spec, layer)
        #: `values` is None in latent layers.
        self.keys, self.values = parts[0], None if spec.value_dim else parts[1]
        token_bytes = 2 * torch.float32.itemsize * spec.num_kv_heads * spec.head_dim
        has_cap = spec.soft_cap is not None
        self.view = _View(
            self.group,
            self.block_size,
            spec.window,
            spec.causal,
            spec.sees_ahead,
            has_cap,
            token_bytes,
        )

    def attend(self, q: torch.Tensor, call: _Call) -> Part:
        """The step's q -> the call's outputs [n * m, Hq, Dv] and log-sum-exps [n * m, Hq]."""
        out, lse = self._attend_call(q, call)
        return out[..., : self.spec.output_dim], lse

    def store(
        self, slots: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor | None
    ) -> None:
        """Write the step's k and v to the block and offset of each token."""
        self.keys.write(slots, rotate_vectors(k) if self.is_rotated else k)
        if self.values is not None:
            assert v is not None, "a layer that is not latent is called with values"
            self.values.write(slots, self.spec.with_zeros(v))

    def _attend_call(self, q: torch.Tensor, call: _Call) -> Part:
        """Like `attend`, but outputs have D elements per head."""
        count, m = call.tokens.numel(), call.tokens.shape[1]
        queries = q.index_select(0, call.tokens.flatten())
        grouped = queries.view(count, self.spec.num_kv_heads, -1, self.spec.head_dim)
        k = self.keys.gather(call)
        v = k if self.values is None else self.values.gather(call)
        if m == 1:
            # torch's order of summation depends on the alignment of its buffers. Each thread has a
            # buffer of m * (l + D + 2) floats, and the buffers are adjacent. If m is a multiple of
            # ALIGNED_ROWS, all buffers begin at a multiple of 64 bytes. A single tile is doubled,
            # because torch would split its sums among threads.
            group_size = grouped.shape[2]
            grouped = torch.nn.functional.pad(grouped, (0, 0, 0, -group_size % ALIGNED_ROWS))
            if count == 1:
                grouped, k, v = (x.expand(2, -1, -1, -1) for x in (grouped, k, v))
            out, lse = (x[:count, :, :group_size] for x in self._attend(grouped, k, v, call))
            return out.reshape(queries.shape), lse.reshape(queries.shape[:2])
        # The query heads of a KV head read its keys through a view, without copies.
        k, v = (x[0, :, None].expand(-1, grouped.shape[2], -1, -1) for x in (k, v))
        out, lse = self._attend(grouped.permute(1, 2, 0, 3), k, v, call)
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
        return out.reshape(queries.shape), lse.reshape(queries.shape[:2])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> Part:
        """q [b, h, m, D], k and v [b, h, l, D] -> [b, h, m, D], [b, h, m]."""
        scale, cap = self.spec.scale, self.spec.soft_cap
        if cap is None:
            # `scaled_dot_product_attention` calls this, but doesn't return log-sum-exps.
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
    """Parts out [p, Hq, D], lse [p, Hq], of tokens [p] -> [count, Hq, D], [count, Hq].

    A token's parts are added in their order. `out` is overwritten.
    """
    peak = lse.new_full((count, lse.shape[1]), _NEVER)
    peak.scatter_reduce_(0, tokens[:, None].expand_as(lse), lse, "amax")
    weights = (lse - peak[tokens]).exp_()
    mass = torch.zeros_like(peak).index_add_(0, tokens, weights)
    total = out.new_zeros(count, *out.shape[1:])
    total.index_add_(0, tokens, out.mul_(weights[..., None]))
    return total.div_(mass[..., None]), mass.log_().add_(peak)


class TorchPagedAttention(AttentionBackend):
    """Attention in torch. The batch must not change between `plan` and the step's last `run`."""

    serves_sight_ahead = True

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

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        bound, sinks = self._layers[layer], inputs.sinks
        assert len(inputs.q) == self._num_tokens, "run serves the step that was planned"
        assert (sinks is not None) == bound.spec.has_sinks
        is_latent = bound.spec.value_dim is not None
        assert inputs.rotation is None or not is_latent, "models of latent layers turn q, k"
        q, k = rotated(inputs)
        if k is not None:
            bound.store(self._slots[bound.group, bound.block_size], k, inputs.v)
        plan = self._plans[bound.view]
        wide_q = (rotate_vectors(q) if bound.is_rotated else q.float()).contiguous()
        parts = [bound.attend(wide_q, call) for call in plan.calls]
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if plan.tokens is not None:
            out, lse = _merged(out, lse, plan.tokens, len(q))
        if sinks is not None:  # a learned score per head, whose value vector is zero
            out = out * torch.sigmoid(lse - sinks.float())[..., None]
        return out.to(q.dtype)
