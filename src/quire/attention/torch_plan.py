"""What the torch backend prepares once a step: which stored tokens to gather, how they are cut.

Knows block tables, lengths and windows; knows no q, k, v and no layer. Called by `torch_paged.py`,
once for each set of layers that see the same memory in the same way (`PlanKey`).

How a layer's pages are addressed. `row` = Hkv * D elements is one token's K (or V):

    page      [K: B rows][V: B rows]        a layer's part of one block
    unit      U rows of K or of V, U = min(B, smallest tile); never crosses a block
    grain     the greatest range of elements that divides the unit and the distance between pages,
              so that the whole pool reads as a matrix [*, grain] of which pages take a part;
              grain == unit wherever the pool's padding allows

Decode rows are cut into tiles of TILE_TOKENS, the largest that still fit first, the rest padded to
the smallest. The cut depends on the row's own context alone, and tiles of one size from all rows
are attended together: a short row is never padded to a long one.
"""

import math
from dataclasses import dataclass

import torch

from quire.attention.interface import AttentionBatch, AttentionSpec, LayerKV

TILE_TOKENS = (512, 128, 32)
"""Sizes of decode tiles, each a multiple of the next. Measured in `torch_paged.py`'s text."""

PIECE_BYTES = 8 << 20
"""How much fp32 K and V one gather brings in: more leaves the processor's last-level cache."""

PLAIN_CHUNK_TOKENS = 2048
"""Queries and keys attended at once where a fused kernel holds no score matrix."""

MASKED_CHUNK_TOKENS = 256
"""The same where a mask or a score matrix is materialized."""

_NEVER = float("-inf")


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
        unit_tokens = min(block_size, TILE_TOKENS[-1])
        page_stride = layer.pages.stride(0) // layer.format.dtype.itemsize
        grain = math.gcd(page_stride, unit_tokens * row)
        return PageGeometry(block_size, row, unit_tokens, grain, page_stride // grain)

    def grains(self, blocks: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """Grains of K, then of V, of unit `units[i]` (within its block) of `blocks[i]`: [2 * n]."""
        per_unit = self.unit_tokens * self.row // self.grain
        first = blocks.long() * self.grains_per_page + units * per_unit
        keys = (first[:, None] + torch.arange(per_unit, device=first.device)).flatten()
        values = keys + self.block_size // self.unit_tokens * per_unit
        return torch.cat([keys, values])

    def flat_view(self, layer: LayerKV) -> torch.Tensor:
        """The pool from this layer's first element on as [*, grain], ending with its last page."""
        pages = layer.pages.view(layer.format.dtype)
        page_grains = 2 * self.block_size * self.row // self.grain
        num_grains = (pages.shape[0] - 1) * self.grains_per_page + page_grains
        return pages.as_strided((num_grains, self.grain), (self.grain, 1))


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Layers with equal keys share a plan.

    materialized: scores are held as a matrix (soft cap, or no fused kernel on the device).
    """

    group: int
    window: int | None
    causal: bool
    materialized: bool
    geometry: PageGeometry


@dataclass(frozen=True, slots=True)
class DecodePiece:
    """Tiles of one size, gathered and attended together: n tiles of L tokens.

    rows: [n] the sequence of each tile.
    grains: of K, then V, in tile order. garbage: the gathered slots in [0, n * L) that hold no
        token of the sequence; they may hold anything, NaN included, and are zeroed.
    mask: [n, 1, 1, L] fp32, 0 or -inf; None where every slot is visible.
    """

    tile_tokens: int
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
    """The decode rows, tile by tile in position order within a row, and the chunks."""

    pieces: tuple[DecodePiece, ...]
    tile_rows: torch.Tensor
    one_tile_each: bool
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
        planner = _ChunkPlanner(key, block_table[seq], first, num_queries, context)
        chunks += planner.tiles()
        first += num_queries
    one_tile_each = len(pieces) == 1 and rows.shape[0] == batch.num_decodes
    return GroupPlan(pieces, rows, one_tile_each, tuple(chunks))


def _plan_decodes(
    key: PlanKey, batch: AttentionBatch, block_table: torch.Tensor
) -> tuple[DecodePiece, ...]:
    """Cut all decode rows, largest tiles first, and split tiles of one size into pieces."""
    context = torch.tensor(batch.context_lens_list[: batch.num_decodes])
    lowest = torch.zeros_like(context)
    if key.window is not None:
        lowest = (context - key.window).clamp_(min=0)
    start = lowest // key.geometry.unit_tokens * key.geometry.unit_tokens
    max_slots = max(TILE_TOKENS[0], PIECE_BYTES // (8 * key.geometry.row))
    pieces: list[DecodePiece] = []
    for size in TILE_TOKENS:
        remaining = context - start
        is_last = size == TILE_TOKENS[-1]
        counts = (remaining + size - 1) // size if is_last else remaining // size
        rows = torch.repeat_interleave(counts)
        ordinals = torch.arange(rows.shape[0]) - (counts.cumsum(0) - counts)[rows]
        positions = start[rows] + ordinals * size
        start = start + counts * size
        for i in range(0, rows.shape[0], max(1, max_slots // size)):
            part = slice(i, i + max(1, max_slots // size))
            tiles = _Tiles(size, rows[part], positions[part], context, lowest)
            pieces.append(tiles.piece(key.geometry, block_table))
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of `size` tokens: tile i holds positions [positions[i], + size) of rows[i]."""

    size: int
    rows: torch.Tensor
    positions: torch.Tensor
    context: torch.Tensor
    lowest: torch.Tensor

    def piece(self, geometry: PageGeometry, block_table: torch.Tensor) -> DecodePiece:
        device = block_table.device
        slots = self.positions[:, None] + torch.arange(self.size)
        exists = slots < self.context[self.rows][:, None]
        visible = exists & (slots >= self.lowest[self.rows][:, None])
        garbage = mask = None
        if not bool(visible.all()):
            zeros = torch.zeros(visible.shape)
            mask = zeros.masked_fill_(~visible, _NEVER)[:, None, None, :].to(device)
        if not bool(exists.all()):
            garbage = (~exists).flatten().nonzero().flatten().to(device)
        rows = self.rows.to(device)
        grains = self._grains(geometry, block_table, rows)
        return DecodePiece(self.size, rows, grains, garbage, mask)

    def _grains(
        self, geometry: PageGeometry, block_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Units past the row's end repeat its last one: its block is its own, so it can be read."""
        unit = geometry.unit_tokens
        last_unit = (self.context[self.rows] - 1) // unit
        units = self.positions[:, None] // unit + torch.arange(self.size // unit)
        units = torch.minimum(units, last_unit[:, None]).to(block_table.device)
        units_per_block = geometry.block_size // unit
        blocks = block_table[rows[:, None], units // units_per_block]
        return geometry.grains(blocks.flatten(), (units % units_per_block).flatten())


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
        units = torch.arange(first_unit, last_unit, device=self.block_row.device)
        units_per_block = geometry.block_size // unit
        blocks = self.block_row[units // units_per_block]
        grains = geometry.grains(blocks, units % units_per_block)
        return grains, (last_unit - first_unit) * unit, first_key - first_unit * unit
