"""What the torch backend prepares once a step: which stored tokens to gather, how they are cut.

Knows block tables, lengths and windows; knows no q, k, v and no layer. Called by `torch_paged.py`,
once for each set of layers that see the same memory in the same way (`PlanKey`).

How a layer's pages are addressed. `row` = Hkv * D elements is one token's K (or V):

    page      [K: B rows][V: B rows]        a layer's part of one block
    unit      U rows of K or of V, U = min(B, TILE_TOKENS); never crosses a block
    grain     the greatest range of elements that divides the unit and the distance between pages,
              so that the whole pool reads as a matrix [*, grain] of which pages take a part;
              grain == unit wherever the pool's padding allows

Decode rows are cut into tiles: TILE_TOKENS tokens at positions that are multiples of TILE_TOKENS.
The tiles of all rows are attended together, so a short row is never padded to a long one: padding
is less than a tile a row, and a step needs no buckets by length.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, AttentionSpec, LayerKV

TILE_TOKENS = 32
"""Of decode. For 48 rows around 300 tokens 32, 64 and 128 are equally fast; for 48 rows of 30
tokens 64 costs 1.5 times and 128 2.5 times as much as 32 (AMD EPYC, 2 cores). Several sizes at
once, the large first, save padding but cost a round of calls each."""

PIECE_BYTES = 4 << 20
"""How much fp32 K and V one gather brings in: more leaves the processor's last-level cache."""

PLAIN_CHUNK_TOKENS = 2048
"""Queries and keys attended at once where a fused kernel holds no score matrix."""

MASKED_CHUNK_TOKENS = 256
"""The same where a mask or a score matrix is materialized."""

_NEVER = float("-inf")
_NEVER_32, _ZERO_32 = np.float32(_NEVER), np.float32(0.0)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Where units lie in a layer's pages; see the module's text."""

    block_size: int
    row: int
    unit_tokens: int
    grain: int
    grains_per_page: int

    @staticmethod
    def of(spec: AttentionSpec, layer: LayerKV) -> "PageGeometry":
        """The geometry of a layer bound to `layer.pages`."""
        block_size = layer.format.block_size
        row = spec.num_kv_heads * spec.head_dim
        unit_tokens = min(block_size, TILE_TOKENS)
        page_stride = layer.pages.stride(0) // layer.format.dtype.itemsize
        grain = math.gcd(page_stride, unit_tokens * row)
        return PageGeometry(block_size, row, unit_tokens, grain, page_stride // grain)

    @property
    def grains_from_key_to_value(self) -> int:
        """How far a token's V lies behind its K."""
        return self.block_size * self.row // self.grain

    def key_grains(self, blocks: Ints, units: Ints) -> Ints:
        """Grains of K of unit `units[...]` (within its block) of `blocks[...]`: [..., per unit]."""
        per_unit = self.unit_tokens * self.row // self.grain
        first = blocks * self.grains_per_page + units * per_unit
        return first[..., None] + np.arange(per_unit)

    def flat_view(self, layer: LayerKV) -> torch.Tensor:
        """The pool from this layer's first element on as [*, grain], ending with its last page."""
        pages = layer.pages.view(layer.format.dtype)
        page_grains = 2 * self.block_size * self.row // self.grain
        num_grains = (pages.shape[0] - 1) * self.grains_per_page + page_grains
        return pages.as_strided((num_grains, self.grain), (self.grain, 1))


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Layers with equal keys share a plan.

    materialized: chunks hold their scores as a matrix (soft cap, no fused kernel on the device).
    """

    group: int
    window: int | None
    causal: bool
    materialized: bool
    geometry: PageGeometry


@dataclass(frozen=True, slots=True)
class DecodePiece:
    """n tiles that are gathered and attended together.

    rows: [n] the sequence of each tile.
    grains: of K, then V, in tile order.
    garbage: the gathered slots in [0, n * TILE_TOKENS) that hold no visible token of the sequence;
        they may hold anything, NaN included, and are zeroed. None: there are none.
    mask: [n, 1, TILE_TOKENS] fp32, -inf for those slots, else 0; None likewise.
    """

    rows: torch.Tensor
    grains: torch.Tensor
    garbage: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Keys that one tile of queries attends at once.

    The gathered units hold num_slots tokens; the span's are [skip, skip + num_keys).
    mask: [queries, num_keys] fp32, or None: all visible, or as `is_causal` says. blind: [queries]
        bool, queries that see none of these keys, if there are any.
    """

    grains: torch.Tensor
    num_slots: int
    skip: int
    num_keys: int
    is_causal: bool
    mask: torch.Tensor | None
    blind: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Query tokens [first, last) of the step. Each query sees a key of the first span: its own."""

    first: int
    last: int
    spans: tuple[ChunkSpan, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The decode rows, tile by tile in position order within a row, and the chunks.

    tile_rows: the rows of all pieces, one after the other.
    """

    pieces: tuple[DecodePiece, ...]
    tile_rows: torch.Tensor
    chunks: tuple[ChunkTile, ...]


def plan_group(key: PlanKey, batch: AttentionBatch) -> GroupPlan:
    """All of a step that layers with this key have in common."""
    block_table = batch.groups[key.group].block_tables
    pieces = _plan_decodes(key, batch, block_table) if batch.num_decodes else ()
    rows = torch.cat([p.rows for p in pieces]) if pieces else block_table.new_empty(0)
    chunks: list[ChunkTile] = []
    first = batch.num_decodes
    for seq in range(batch.num_decodes, len(batch.query_lens_list)):
        num_queries = batch.query_lens_list[seq]
        context = batch.context_lens_list[seq]
        block_row = block_table[batch.rows_list[seq]]
        planner = _ChunkPlanner(key, block_row, first, num_queries, context)
        chunks += planner.tiles()
        first += num_queries
    return GroupPlan(pieces, rows, tuple(chunks))


def _plan_decodes(
    key: PlanKey, batch: AttentionBatch, block_table: torch.Tensor
) -> tuple[DecodePiece, ...]:
    """Cut all decode rows into tiles, and the tiles into pieces.

    In numpy, whose calls on arrays this small cost a third of torch's.
    """
    context = np.array(batch.context_lens_list[: batch.num_decodes], np.int64)
    lowest = np.zeros_like(context)
    if key.window is not None:
        np.maximum(context - key.window, 0, out=lowest)
    first_tile = lowest // TILE_TOKENS
    counts = (context + TILE_TOKENS - 1) // TILE_TOKENS - first_tile
    first = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(len(rows)) + (first_tile - first)[rows]) * TILE_TOKENS
    ends = first + counts - 1
    if key.window is not None:
        ends = np.unique(np.concatenate([first, ends]))
    garbage, mask = _hide_slots(positions, rows, ends, (lowest, context))
    table_rows = np.array(batch.rows_list[: batch.num_decodes], np.int64)[rows]
    units = _tile_units(key.geometry, rows, positions, (lowest, context))
    grains = _unit_grains(key.geometry, block_table.numpy(), table_rows, units)
    max_tiles = max(1, PIECE_BYTES // (8 * key.geometry.row * TILE_TOKENS))
    pieces = []
    for start in range(0, len(rows), max_tiles):
        part = slice(start, start + max_tiles)
        first_slot, end_slot = start * TILE_TOKENS, (start + max_tiles) * TILE_TOKENS
        low, high = np.searchsorted(garbage, (first_slot, end_slot))
        has_garbage = low < high
        pieces.append(
            DecodePiece(
                torch.from_numpy(rows[part]),
                torch.from_numpy(grains[:, part].reshape(-1)),
                torch.from_numpy(garbage[low:high] - first_slot) if has_garbage else None,
                torch.from_numpy(mask[part, None, :]) if has_garbage else None,
            )
        )
    return tuple(pieces)


def _hide_slots(
    positions: Ints, rows: Ints, ends: Ints, visible: tuple[Ints, Ints]
) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The slots outside of their row's visible positions [low, high): their indices in
    [0, n * TILE_TOKENS), ascending, and a mask [n, TILE_TOKENS] that is -inf there, else 0.

    ends: ascending, the tiles at the ends of rows, the only ones that can have such slots.
    """
    low, high = visible
    slots = positions[ends, None] + np.arange(TILE_TOKENS)
    owners = rows[ends, None]
    hidden = (slots < low[owners]) | (slots >= high[owners])
    mask = np.zeros((len(rows), TILE_TOKENS), np.float32)
    mask[ends] = np.where(hidden, _NEVER_32, _ZERO_32)
    return (ends[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS))[hidden], mask


def _tile_units(
    geometry: PageGeometry, rows: Ints, positions: Ints, visible: tuple[Ints, Ints]
) -> Ints:
    """[n, units of a tile], counted within a sequence, for the tiles at `positions` of `rows`.

    Units that hold nothing visible are not read: the nearest one that does stands in for them.
    """
    low, high = visible
    unit = geometry.unit_tokens
    units = positions[:, None] // unit + np.arange(TILE_TOKENS // unit)
    np.minimum(units, ((high - 1) // unit)[rows, None], out=units)
    if low.any():
        np.maximum(units, (low // unit)[rows, None], out=units)
    return units


def _unit_grains(
    geometry: PageGeometry, block_table: npt.NDArray[np.int32], table_rows: Ints, units: Ints
) -> Ints:
    """[2, n, grains of a tile] of K and of V; units [n, units of a tile] of `table_rows` [n]."""
    units_per_block = geometry.block_size // geometry.unit_tokens
    blocks = block_table[table_rows[:, None], units // units_per_block].astype(np.int64)
    keys = geometry.key_grains(blocks, units % units_per_block).reshape(len(units), -1)
    return np.stack([keys, keys + geometry.grains_from_key_to_value])


@dataclass(frozen=True, slots=True)
class _ChunkPlanner:
    """Cuts one sequence's chunk: queries at the end of its context, from token `first` of the step.

    Window and causality are dropped where they hide nothing, so those rows take the fast path.
    """

    key: PlanKey
    block_row: torch.Tensor
    first: int
    num_queries: int
    context: int

    def tiles(self) -> list[ChunkTile]:
        start = self.context - self.num_queries
        step = self._tile_tokens()
        tiles = []
        for low in range(start, self.context, step):
            high = min(low + step, self.context)
            offset = self.first - start
            tiles.append(ChunkTile(low + offset, high + offset, self._spans(low, high)))
        return tiles

    def _window(self) -> int | None:
        window = self.key.window
        return None if window is None or window >= self.context else window

    def _tile_tokens(self) -> int:
        masked = self.key.materialized or self._window() is not None
        return MASKED_CHUNK_TOKENS if masked else PLAIN_CHUNK_TOKENS

    def _spans(self, low: int, high: int) -> tuple[ChunkSpan, ...]:
        """Keys for the queries at [low, high): their own range first, then what else they see."""
        window = self._window()
        step = self._tile_tokens()
        lowest = 0 if window is None else max(0, low - window + 1)
        highest = self.context if window is None else min(self.context, high + window - 1)
        ranges = [(a, min(a + step, low)) for a in range(lowest, low, step)]
        if not self.key.causal:
            ranges += [(a, min(a + step, highest)) for a in range(high, highest, step)]
        return tuple(self._span(low, high, a, b) for a, b in [(low, high), *ranges])

    def _span(self, low: int, high: int, first_key: int, last_key: int) -> ChunkSpan:
        window = self._window()
        mask = blind = None
        hides = window is not None and (first_key <= high - 1 - window or last_key > low + window)
        is_own = first_key == low
        if hides:
            assert window is not None
            distance = torch.arange(low, high)[:, None] - torch.arange(first_key, last_key)
            hidden = distance.abs() >= window
            if self.key.causal:
                hidden |= distance < 0
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, _NEVER).to(self.block_row.device)
            unseen = hidden.all(dim=1)
            blind = unseen.to(self.block_row.device) if bool(unseen.any()) else None
        is_causal = is_own and self.key.causal and mask is None
        grains, num_slots, skip = self._grains(first_key, last_key)
        return ChunkSpan(grains, num_slots, skip, last_key - first_key, is_causal, mask, blind)

    def _grains(self, first_key: int, last_key: int) -> tuple[torch.Tensor, int, int]:
        """What to gather for keys [first_key, last_key), whole units, and how many to skip."""
        geometry = self.key.geometry
        unit = geometry.unit_tokens
        first_unit, last_unit = first_key // unit, -(-last_key // unit)
        units = np.arange(first_unit, last_unit)
        units_per_block = geometry.block_size // unit
        blocks = self.block_row.numpy()[units // units_per_block].astype(np.int64)
        keys = geometry.key_grains(blocks, units % units_per_block).ravel()
        grains = torch.from_numpy(np.concatenate([keys, keys + geometry.grains_from_key_to_value]))
        return grains, (last_unit - first_unit) * unit, first_key - first_unit * unit
