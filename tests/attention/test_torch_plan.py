"""What a step gathers: the right grains, none that may not be read, in bounded pieces."""

import numpy as np
import pytest
import torch
from tests.attention.paged import make_layers, make_spec, scatter_rows

from quire.attention.interface import AttentionBatch, GroupBatch, LayerKV
from quire.attention.torch_paged import TorchPagedAttention
from quire.attention.torch_plan import (
    MASKED_CHUNK_TOKENS,
    MAX_SHARED_TILES,
    MAX_STACK_ROWS,
    PIECE_BYTES,
    PLAIN_CHUNK_TOKENS,
    TILE_TOKENS,
    DecodePiece,
    PageGeometry,
    PlanKey,
    SharedPiece,
    plan_group,
)
from quire.core.step import HOLE_BLOCK


def make_key(spec, block_size, materialized=False):
    _, (layer,) = make_layers(TorchPagedAttention, (spec,), (0,), 4, block_size, torch.float32)
    geometry = PageGeometry.of(spec, layer)
    return PlanKey(0, spec.num_heads, spec.window, spec.causal, materialized, geometry)


def make_batch(query_lens, contexts, block_size, tables=None):
    """Sequence i owns blocks 1000 * (i + 1) onward unless `tables` says otherwise."""
    if tables is None:
        starts = [1000 * (i + 1) for i in range(len(contexts))]
        counts = [-(-context // block_size) for context in contexts]
        tables = [list(range(s, s + n)) for s, n in zip(starts, counts, strict=True)]
    rows, block_tables = scatter_rows(tables)
    return AttentionBatch(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        rows=torch.tensor(rows),
        query_lens_list=query_lens,
        context_lens_list=contexts,
        rows_list=rows,
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        groups=(GroupBatch(block_tables, torch.zeros(sum(query_lens), dtype=torch.int64)),),
    )


def blocks_of(grains, geometry):
    return set((grains // geometry.grains_per_page).tolist())


@pytest.mark.parametrize("block_size", [8, 16, 64, 512])
@pytest.mark.parametrize("padding_bytes", [0, 64, 4 * 40 * 3, 4])
def test_grains_are_the_units(block_size, padding_bytes):
    """Whatever pads the distance between pages, the flat view holds the pages' own rows."""
    spec = make_spec(2, 2, 20)
    storage, layers = make_layers(
        TorchPagedAttention, (spec, spec), (0, 0), 5, block_size, torch.float32, padding_bytes
    )
    values = torch.randn(storage.numel() // 4, generator=torch.Generator().manual_seed(0))
    storage.view(torch.float32).copy_(values.view(5, -1))
    for layer in layers:
        geometry = PageGeometry.of(spec, layer)
        assert geometry.grain == geometry.row * geometry.unit_tokens or padding_bytes
        pages = layer.pages.view(torch.float32).view(5, 2, -1, geometry.unit_tokens, 40)
        blocks = np.array([3, 0, 4])
        units = np.array([0, pages.shape[2] - 1, 0])
        keys = geometry.key_grains(blocks, units).ravel()
        grains = np.concatenate([keys, keys + geometry.grains_from_key_to_value])
        gathered = geometry.flat_view(layer)[torch.from_numpy(grains)]
        expected = pages[torch.from_numpy(blocks), :, torch.from_numpy(units)].transpose(0, 1)
        assert torch.equal(gathered.flatten(), expected.flatten())


def test_one_block_pool_has_a_flat_view():
    spec = make_spec()
    _, (layer,) = make_layers(TorchPagedAttention, (spec,), (0,), 1, 16, torch.float32)
    geometry = PageGeometry.of(spec, layer)
    assert geometry.flat_view(layer).numel() * 4 == layer.format.bytes_per_layer


@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_decode_reads_only_own_blocks(block_size):
    contexts = [1, block_size, block_size + 1, 700, 64, 65]
    key = make_key(make_spec(), block_size)
    plan = plan_group(key, make_batch([1] * 6, contexts, block_size))
    read = set().union(*(blocks_of(p.grains, key.geometry) for p in plan.pieces))
    counts = [-(-context // block_size) for context in contexts]
    own = {1000 * (i + 1) + n for i, count in enumerate(counts) for n in range(count)}
    assert read == own
    assert [r for p in plan.pieces for r in p.rows] == sorted(
        r for p in plan.pieces for r in p.rows
    )


def test_decode_padding_is_less_than_a_tile_a_row():
    contexts = [1, 63, 64, 65, 640, 5]
    plan = plan_group(make_key(make_spec(), 16), make_batch([1] * 6, contexts, 16))
    rows = torch.cat([p.rows for p in plan.pieces])
    assert rows.bincount().tolist() == [-(-c // TILE_TOKENS) for c in contexts]


def test_full_tiles_have_no_mask():
    plan = plan_group(make_key(make_spec(), 16), make_batch([1, 1], [64, 128], 16))
    assert [(p.mask, p.garbage) for p in plan.pieces] == [(None, None)]


@pytest.mark.parametrize("query_len", [1, 5, 300])
def test_out_of_window_blocks_are_not_read(query_len):
    """Their table entries may be holes."""
    key = make_key(make_spec(window=100), 16)
    context, block_size = 1000, 16
    first_visible = context - query_len - 100 + 1
    num_holes = first_visible // block_size
    table = [HOLE_BLOCK] * num_holes + list(range(1000 + num_holes, 1070))
    plan = plan_group(key, make_batch([query_len], [context], block_size, [table]))
    grains = [p.grains for p in plan.pieces] + [s.grains for c in plan.chunks for s in c.spans]
    read = set().union(*(blocks_of(g, key.geometry) for g in grains))
    assert min(read) == 1000 + first_visible // block_size
    assert max(read) == 1000 + (context - 1) // block_size


def test_pieces_are_bounded():
    key = make_key(make_spec(), 16)
    plan = plan_group(key, make_batch([1] * 8, [20_000] * 8, 16))
    assert len(plan.pieces) > 1
    for piece in plan.pieces:
        assert piece.rows.shape[0] * TILE_TOKENS * key.geometry.row * 8 <= PIECE_BYTES
    rows = torch.cat([p.rows for p in plan.pieces])
    assert plan.item_rows.tolist() == [r * 2 + head for r in rows.tolist() for head in (0, 1)]


def test_a_shared_prefix_is_gathered_once():
    key = make_key(make_spec(), 16)
    shared, num_rows = list(range(1, 41)), 40
    tables = [[*shared, 1000 + i, 2000 + i] for i in range(num_rows)]
    plan = plan_group(
        key, make_batch([1] * num_rows, [640 + 17 + i % 15 for i in range(num_rows)], 16, tables)
    )
    grains = torch.cat([p.grains for p in plan.pieces])
    keys = grains[grains % key.geometry.grains_per_page < key.geometry.grains_from_key_to_value]
    count = (keys // key.geometry.grains_per_page).bincount()
    assert (count[1:41] == 1).all()
    assert (count[1000:1040] == 1).all()
    assert (count[2000:2040] == 1).all()
    shares = [p for p in plan.pieces if isinstance(p, SharedPiece)]
    assert sum(p.num_tiles for p in shares) == 640 // TILE_TOKENS
    assert {len(stack) for p in shares for stack in p.stacks} == {
        MAX_STACK_ROWS,
        40 - MAX_STACK_ROWS,
    }
    for piece in shares:
        assert piece.num_tiles <= MAX_SHARED_TILES
        assert torch.cat(piece.stacks).tolist() == list(range(40))


def test_shared_pieces_are_bounded_too():
    key = make_key(make_spec(), 16)
    tables = [[*range(1, 1001), 2000 + i] for i in range(3)]
    plan = plan_group(key, make_batch([1] * 3, [16_005] * 3, 16, tables))
    tiles = [p.num_tiles for p in plan.pieces if isinstance(p, SharedPiece)]
    assert sum(tiles) == 500
    assert max(tiles) <= MAX_SHARED_TILES
    assert max(tiles) * TILE_TOKENS * key.geometry.row * 8 <= PIECE_BYTES


@pytest.mark.parametrize("window", [None, 500])
def test_the_items_of_a_row_come_in_the_order_of_its_positions(window):
    """A head that the window cuts, what is shared, a tail: what they gather, row by row."""
    key = make_key(make_spec(2, 1, 128, window=window), 16)
    tables = [[*range(1, 41), 1000 + i] for i in range(20)]
    plan = plan_group(key, make_batch([1] * 20, [650] * 20, 16, tables))
    assert [type(p) for p in plan.pieces].count(SharedPiece) == 1
    per_unit = key.geometry.unit_tokens * key.geometry.row // key.geometry.grain
    assert per_unit == 1
    blocks_by_row = {row: [] for row in range(20)}
    items = plan.item_rows.tolist()
    for piece in plan.pieces:
        units = piece.grains.view(2, -1, TILE_TOKENS // key.geometry.unit_tokens)[0]
        blocks = (units // key.geometry.grains_per_page)[:, 0].tolist()
        order = (
            [(block, row) for block, row in zip(blocks, piece.rows.tolist(), strict=True)]
            if isinstance(piece, DecodePiece)
            else [(b, r) for stack in piece.stacks for b in blocks for r in stack.tolist()]
        )
        for block, row in order:
            assert items.pop(0) == row
            blocks_by_row[row].append(block)
    assert items == []
    first = 0 if window is None else (650 - window) // TILE_TOKENS
    wanted = [
        max(1 + 2 * tile, 0 if window is None else 1 + (650 - window) // 16)
        for tile in range(first, 20)
    ]
    assert blocks_by_row == {row: [*wanted, 1000 + row] for row in range(20)}


@pytest.mark.parametrize(
    ("options", "materialized", "bound"),
    [
        ({}, False, PLAIN_CHUNK_TOKENS),
        ({"causal": False}, False, PLAIN_CHUNK_TOKENS),
        ({"window": 6000}, False, PLAIN_CHUNK_TOKENS),  # hides nothing
        ({"window": 600}, False, MASKED_CHUNK_TOKENS),
        ({}, True, MASKED_CHUNK_TOKENS),
    ],
)
def test_spans_are_bounded_and_cover_what_is_seen(options, materialized, bound):
    key = make_key(make_spec(**options), 16, materialized)
    plan = plan_group(key, make_batch([4500], [6000], 16))
    assert [t.first for t in plan.chunks] == list(range(0, 4500, bound))
    assert plan.chunks[-1].last == 4500
    for tile in plan.chunks:
        assert tile.last - tile.first <= bound
        assert all(span.num_keys <= bound for span in tile.spans)
        high = 1500 + tile.last
        low = max(0, 1500 + tile.first - options.get("window", 10**9) + 1)
        seen = high - low if options.get("causal", True) else 6000
        assert sum(span.num_keys for span in tile.spans) == seen


def test_only_partly_hidden_spans_carry_a_mask():
    key = make_key(make_spec(window=1000), 16)
    plan = plan_group(key, make_batch([512], [4096], 16))
    for tile in plan.chunks:
        own, *others = [span.mask is not None for span in tile.spans]
        assert not own
        assert 1 <= sum(others) <= 2
        assert not any(others[2:])


def test_a_batch_of_layers_shares_grains_by_geometry():
    """The distance between pages counts, the place within them does not."""
    spec = make_spec()
    _, layers = make_layers(TorchPagedAttention, (spec,) * 3, (0,) * 3, 4, 16, torch.float32)
    assert len({PageGeometry.of(spec, layer) for layer in layers}) == 1
    far = LayerKV(layers[0].pages[::2], 0, layers[0].format)
    assert PageGeometry.of(spec, far) != PageGeometry.of(spec, layers[0])
