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
is less than a tile a row, and a step needs no buckets by length. Tiles that lie in the same blocks
for several rows are gathered once (a cascade): see `shared_prefix.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, AttentionSpec, LayerKV
from quire.attention.shared_prefix import DecodeRows, Ints, SharedRun, shared_runs

TILE_TOKENS = 32
"""Of decode. For 48 rows around 300 tokens 32, 64 and 128 are equally fast; for 48 rows of 30
tokens 64 costs 1.5 times and 128 2.5 times as much as 32 (AMD EPYC, 2 cores). Several sizes at
once, the large first, save padding but cost a round of calls each."""

PIECE_BYTES = 4 << 20
"""How much fp32 K and V one gather brings in: more leaves the processor's last-level cache."""

MIN_SAVED_BYTES = 1 << 20
"""Of fp32 K and V that a shared run must save: its round of calls costs as much as half of that
(100 us; AMD EPYC, one core)."""

MAX_STACK_ROWS = 32
"""Rows whose scores against a shared tile are one product: for 32 rows, 7 query heads to a KV head,
9 % faster than two products of 16, 14 % than four of 8 (AMD EPYC, one core)."""

MAX_SHARED_TILES = 32
"""That a stack is attended with at once: 16 cost 2 to 7 % more time, 64 save 2 % and hold twice the
scores (AMD EPYC, one core)."""

PLAIN_CHUNK_TOKENS = 2048
"""Queries and keys attended at once where a fused kernel holds no score matrix."""

MASKED_CHUNK_TOKENS = 256
"""The same where a mask or a score matrix is materialized."""

_NEVER = float("-inf")
_NONE = np.zeros(0, np.int64)
_NEVER_32, _ZERO_32 = np.float32(_NEVER), np.float32(0.0)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Where units lie in a layer's pages; see the module's text."""

    block_size: int
    num_kv_heads: int
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
        return PageGeometry(
            block_size, spec.num_kv_heads, row, unit_tokens, grain, page_stride // grain
        )

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
    num_heads: int
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

    def num_row_tiles(self) -> list[int]:
        """Of what is attended at once: tiles, each with one row."""
        return [len(self.rows)]


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Tiles that are gathered once for all rows of `stacks`; every slot is visible to each.

    grains: of K, then V, in tile order. num_tiles: n.
    stacks: each [m], the decode rows that are attended in one product, m <= MAX_STACK_ROWS.
    """

    grains: torch.Tensor
    num_tiles: int
    stacks: tuple[torch.Tensor, ...]

    def num_row_tiles(self) -> list[int]:
        """Of each stack: tiles times rows."""
        return [self.num_tiles * len(rows) for rows in self.stacks]


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

    item_rows: row * Hkv + KV head of the items that the pieces yield, one piece after the other:
        [n, Hkv] of a DecodePiece, [Hkv, n, m] for each stack of a SharedPiece.
    """

    pieces: tuple[DecodePiece | SharedPiece, ...]
    item_rows: torch.Tensor
    chunks: tuple[ChunkTile, ...]


def plan_group(key: PlanKey, batch: AttentionBatch) -> GroupPlan:
    """All of a step that layers with this key have in common."""
    block_table = batch.groups[key.group].block_tables
    pieces, item_rows = _plan_decodes(key, batch, block_table) if batch.num_decodes else ((), _NONE)
    chunks: list[ChunkTile] = []
    first = batch.num_decodes
    for seq in range(batch.num_decodes, len(batch.query_lens_list)):
        num_queries = batch.query_lens_list[seq]
        context = batch.context_lens_list[seq]
        block_row = block_table[batch.rows_list[seq]]
        planner = _ChunkPlanner(key, block_row, first, num_queries, context)
        chunks += planner.tiles()
        first += num_queries
    return GroupPlan(tuple(pieces), torch.from_numpy(item_rows), tuple(chunks))


def _plan_decodes(
    key: PlanKey, batch: AttentionBatch, block_table: torch.Tensor
) -> tuple[Sequence[DecodePiece | SharedPiece], Ints]:
    """Cut all decode rows into tiles, and the tiles into pieces -> `GroupPlan`'s first two fields.

    In numpy, whose calls on arrays this small cost a third of torch's.
    """
    context = np.array(batch.context_lens_list[: batch.num_decodes], np.int64)
    lowest = np.zeros_like(context)
    if key.window is not None:
        np.maximum(context - key.window, 0, out=lowest)
    table_rows = np.array(batch.rows_list[: batch.num_decodes], np.int64)
    decodes = DecodeRows(block_table.numpy(), table_rows, lowest, context)
    first_tile, end_tile = lowest // TILE_TOKENS, -(-context // TILE_TOKENS)
    min_saved_tiles = -(-MIN_SAVED_BYTES // _tile_bytes(key))
    runs = shared_runs(decodes, key.geometry.block_size, TILE_TOKENS, min_saved_tiles)
    if not runs:
        return _own_pieces(key, decodes, first_tile, end_tile)
    first_shared, end_shared = end_tile.copy(), first_tile.copy()
    for run in runs:
        np.minimum.at(first_shared, run.rows, run.first_tile)
        np.maximum.at(end_shared, run.rows, run.end_tile)
    has_run = first_shared < end_shared
    # A row's items are summed in the order of the pieces, which must be that of its positions.
    heads = _own_pieces(key, decodes, first_tile, np.where(has_run, first_shared, first_tile))
    shared = [_shared_pieces(key, decodes, run) for run in runs]
    tails = _own_pieces(key, decodes, np.where(has_run, end_shared, first_tile), end_tile)
    pieces: list[DecodePiece | SharedPiece] = [*heads[0]]
    for run_pieces, _ in shared:
        pieces += run_pieces
    pieces += tails[0]
    return pieces, np.concatenate([heads[1], *(item_rows for _, item_rows in shared), tails[1]])


def _tile_bytes(key: PlanKey) -> int:
    """Of a tile's fp32 K and V."""
    return 2 * TILE_TOKENS * key.geometry.row * 4


def _shared_pieces(
    key: PlanKey, decodes: DecodeRows, run: SharedRun
) -> tuple[list[SharedPiece], Ints]:
    """The pieces of a run, and the rows of their items."""
    stacks = np.split(run.rows, range(MAX_STACK_ROWS, len(run.rows), MAX_STACK_ROWS))
    tensors = tuple(map(torch.from_numpy, stacks))
    heads = np.arange(key.geometry.num_kv_heads)[:, None, None]
    step = max(1, min(MAX_SHARED_TILES, PIECE_BYTES // _tile_bytes(key)))
    pieces, item_rows = [], []
    for start in range(run.first_tile, run.end_tile, step):
        positions = np.arange(start, min(start + step, run.end_tile)) * TILE_TOKENS
        owners = np.full(len(positions), run.rows[0])
        grains = _unit_grains(key.geometry, decodes, owners, positions)
        pieces.append(SharedPiece(torch.from_numpy(grains.reshape(-1)), len(positions), tensors))
        for rows in stacks:
            items = rows * len(heads) + heads
            item_rows.append(np.repeat(items, len(positions), axis=1).ravel())
    return pieces, np.concatenate(item_rows)


def _own_pieces(
    key: PlanKey, decodes: DecodeRows, first_tile: Ints, end_tile: Ints
) -> tuple[list[DecodePiece], Ints]:
    """Pieces of each row's tiles [first_tile, end_tile), row by row; the rows of their items."""
    counts = end_tile - first_tile
    if not counts.any():
        return [], _NONE
    ends = np.cumsum(counts)
    first = ends - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(len(rows)) + (first_tile - first)[rows]) * TILE_TOKENS
    has_tiles = counts > 0
    edges = ends[has_tiles] - 1
    if key.window is not None:
        edges = np.unique(np.concatenate([first[has_tiles], edges]))
    garbage, mask = _hide_slots(positions, rows, edges, decodes)
    grains = _unit_grains(key.geometry, decodes, rows, positions)
    max_tiles = max(1, PIECE_BYTES // _tile_bytes(key))
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
    num_kv_heads = key.geometry.num_kv_heads
    return pieces, (rows[:, None] * num_kv_heads + np.arange(num_kv_heads)).ravel()


def _hide_slots(
    positions: Ints, rows: Ints, ends: Ints, decodes: DecodeRows
) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The slots outside of their row's visible positions: their indices in [0, n * TILE_TOKENS),
    ascending, and a mask [n, TILE_TOKENS] that is -inf there, else 0.

    ends: ascending, the tiles at the ends of rows, the only ones that can have such slots.
    """
    low, high = decodes.low, decodes.high
    slots = positions[ends, None] + np.arange(TILE_TOKENS)
    owners = rows[ends, None]
    hidden = (slots < low[owners]) | (slots >= high[owners])
    mask = np.zeros((len(rows), TILE_TOKENS), np.float32)
    mask[ends] = np.where(hidden, _NEVER_32, _ZERO_32)
    return (ends[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS))[hidden], mask


def _unit_grains(geometry: PageGeometry, decodes: DecodeRows, rows: Ints, positions: Ints) -> Ints:
    """[2, n, grains of a tile] of K and of V, for the tiles at `positions` [n] of `rows` [n].

    Units that hold nothing visible are not read: the nearest one that does stands in for them.
    """
    unit = geometry.unit_tokens
    units = positions[:, None] // unit + np.arange(TILE_TOKENS // unit)
    np.minimum(units, ((decodes.high - 1) // unit)[rows, None], out=units)
    if decodes.low.any():
        np.maximum(units, (decodes.low // unit)[rows, None], out=units)
    units_per_block = geometry.block_size // unit
    table_rows = decodes.table_rows[rows, None]
    blocks = decodes.block_table[table_rows, units // units_per_block].astype(np.int64)
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
