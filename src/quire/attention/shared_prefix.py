"""Finds decode rows that share stored prefixes, from their block tables.

Rows share a block if their tables have the same block id at the same index. Examples are parallel
samples, beams, and requests with one system prompt. A tile is a fixed number of consecutive tokens,
which a backend reads at once. Called by `torch_paged.py` and `cpu_paged.py`.

The search is cheap if nothing is shared: it compares the rows' first visible entries, and reads
each table only as far as it is shared.

    tables   a b c d e        a tree of runs   {0,1,2}: a b
             a b c d f                           {0,1}: c d
             a b g                               alone: e, f, g
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_FIRST_STRIDE_BLOCKS = 16
"""The number of table entries that are compared first. It is doubled whenever all agree."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step in one KV group."""

    #: [R, most blocks] int32, the table of all rows.
    block_table: npt.NDArray[np.int32]
    #: [n], the indices of the decode rows in the table.
    table_rows: Ints
    #: [n] each: a row sees the positions [low, high).
    low: Ints
    high: Ints


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """A run of tiles [first_tile, end_tile) in blocks that `rows` share and see completely."""

    #: [m] ascending, m >= 2: indices among the decode rows.
    rows: Ints
    first_tile: int
    end_tile: int


def shared_runs(
    decodes: DecodeRows, block_size: int, tile_tokens: int, min_saved_tiles: int
) -> list[SharedTiles]:
    """The runs of shared tiles that each save at least min_saved_tiles reads of a tile.

    The runs of one row are contiguous and ordered by position. Rows with windows share only if
    their windows begin in the same block, for example branches of equal length.
    """
    first_blocks = decodes.low // block_size
    entries = decodes.block_table[decodes.table_rows, first_blocks].tolist()
    if len(set(entries)) == len(entries):
        return []
    search = _Search(decodes, block_size, tile_tokens, min_saved_tiles)
    runs: list[SharedTiles] = []
    for rows in _equal(list(zip(entries, first_blocks.tolist(), strict=True))):
        first_tile = -(-int(decodes.low[rows].max()) // tile_tokens)
        runs += search.runs(rows, int(first_blocks[rows[0]]), first_tile)
    return runs


def _equal(values: list[tuple[int, int]]) -> Iterator[Ints]:
    """For each value that occurs at least twice, the indices at which it occurs."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return (np.array(p, np.int64) for p in places.values() if len(p) > 1)


@dataclass(frozen=True, slots=True)
class _Search:
    decodes: DecodeRows
    block_size: int
    tile_tokens: int
    min_saved_tiles: int

    def runs(self, rows: Ints, first_block: int, first_tile: int) -> list[SharedTiles]:
        """Runs of `rows`, whose tables agree before block `first_block`.

        The earliest run starts at `first_tile`.
        """
        found: list[SharedTiles] = []
        waiting = [(rows, first_block, first_tile)]
        while waiting:
            rows, block, tile = waiting.pop()
            num_blocks = self.decodes.high[rows] // self.block_size
            end_block = self._end_of_agreement(rows, block, int(num_blocks.min()))
            end_tile = end_block * self.block_size // self.tile_tokens
            if (len(rows) - 1) * (end_tile - tile) >= self.min_saved_tiles:
                found.append(SharedTiles(rows, tile, end_tile))
                tile = end_tile
            # Rows that differ from here on may still share blocks in smaller groups.
            longer = rows[num_blocks > end_block]
            if self._may_save(longer, tile):
                entries = self.decodes.block_table[self.decodes.table_rows[longer], end_block]
                groups = _equal([(entry, end_block) for entry in entries.tolist()])
                waiting += [(longer[places], end_block, tile) for places in groups]
        return found

    def _may_save(self, rows: Ints, first_tile: int) -> bool:
        """Whether a subset of `rows` could still share enough tiles from `first_tile` on."""
        if len(rows) < 2:
            return False
        num_tiles = int(self.decodes.high[rows].max()) // self.tile_tokens - first_tile
        return (len(rows) - 1) * num_tiles >= self.min_saved_tiles

    def _end_of_agreement(self, rows: Ints, block: int, limit: int) -> int:
        """Index of the first block from `block` on in which rows differ; at most max(block,
        limit)."""
        stride = _FIRST_STRIDE_BLOCKS
        table_rows = self.decodes.table_rows[rows]
        while block < limit:
            ids = self.decodes.block_table[table_rows, block : min(block + stride, limit)]
            agrees = (ids == ids[0]).all(axis=0)
            if not agrees.all():
                return block + int(agrees.argmin())
            block += ids.shape[1]
            stride *= 2
        return block
