"""Products of adapters in the interpreter: their numbers, and that a row has the same bits whatever
the batch."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, numbers

from quire.kernels.triton.linear import adapter_matmul
from quire.kernels.triton.linear.adapter_matmul import (
    AdapterTiles,
    AdapterWeights,
    add_adapters,
    make_weights,
    slices_of,
)

CPU = torch.device("cpu")
NUM_SLOTS, MAX_RANK = 8, 32
RANKS = (16, 1, 32, 0, 17, 8, 3, 24)
SIZES = (70, 20, 64)


def filled(num_inputs: int, dtype: torch.dtype, sizes: tuple[int, ...] = SIZES) -> AdapterWeights:
    """Beyond the ranks is what another adapter left."""
    weights = make_weights(num_inputs, sizes, NUM_SLOTS, MAX_RANK, dtype, CPU)
    weights.a.copy_(numbers(*weights.a.shape, seed=1) * num_inputs**-0.5)
    weights.b.copy_(numbers(*weights.b.shape, seed=2))
    for slot, rank in enumerate(RANKS):
        for part in range(len(sizes)):
            weights.ranks[slot, part] = 0 if part == 1 and slot % 2 else rank
            weights.scales[slot, part] = 0.5 + part
    return weights


def expected(
    x: torch.Tensor, out: torch.Tensor, weights: AdapterWeights, rows: list[int]
) -> torch.Tensor:
    result = out.double()
    for row, slot in enumerate(rows):
        start = 0
        for part, size in enumerate(SIZES):
            rank = 0 if slot < 0 else int(weights.ranks[slot, part])
            a = weights.a[slot, part * MAX_RANK : part * MAX_RANK + rank].double()
            b = weights.b[slot, start : start + size, :rank].double()
            if rank:
                scale = float(weights.scales[slot, part])
                inner = (a @ x[row].double() * scale).to(x.dtype)
                result[row, start : start + size] += b @ inner.double()
            start += size
    return result


def computed(
    x: torch.Tensor, out: torch.Tensor, weights: AdapterWeights, rows: list[int]
) -> torch.Tensor:
    tiles = AdapterTiles(CPU, 100, NUM_SLOTS)
    tiles.set(torch.tensor(rows, dtype=torch.int32))
    result = out.clone()
    add_adapters(x, result, weights, tiles)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_rows"), [(40, 11), (130, 45), (1100, 1)])
def test_deltas_are_added_to_the_rows_that_have_one(num_rows, num_inputs, dtype):
    weights = filled(num_inputs, dtype)
    x, out = numbers(num_rows, num_inputs).to(dtype), numbers(num_rows, 154, seed=3).to(dtype)
    rows = [5] if num_rows == 1 else [row % 9 - 1 for row in range(num_rows)]
    if num_rows == 45:
        rows[:20] = [2] * 20  # more than a tile

    found = computed(x, out, weights, rows)

    wanted = expected(x, out, weights, rows)
    bits = {torch.float32: 16, torch.bfloat16: 7, torch.float16: 10}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-bits, atol=4 * 2.0**-bits)
    base = [row for row, slot in enumerate(rows) if slot < 0 or not weights.ranks[slot].any()]
    assert torch.equal(found[base], out[base])


@pytest.mark.parametrize(("num_inputs", "dtype"), [*zip((130, 1100, 130), DTYPES, strict=True)])
def test_a_row_has_the_same_bits_in_every_crowd(num_inputs, dtype, monkeypatch):
    """Alone, where K is cut over programs, and among so many that one program adds all slices."""
    weights = filled(num_inputs, dtype)
    x, out = numbers(40, num_inputs).to(dtype), numbers(40, 154, seed=3).to(dtype)
    rows = [row * 5 % 9 - 1 for row in range(40)]
    chosen = [0, 3, 8, 39]
    alone = torch.cat(
        [computed(x[at : at + 1], out[at : at + 1], weights, rows[at : at + 1]) for at in chosen]
    )

    assert torch.equal(computed(x[:9], out[:9], weights, rows[:9])[[0, 3, 8]], alone[:3])
    assert slices_of(num_inputs) == (1 if num_inputs == 130 else 2)
    for enough in (1, 10_000):
        monkeypatch.setattr(adapter_matmul, "_ENOUGH_PROGRAMS", enough)
        assert torch.equal(computed(x, out, weights, rows)[chosen], alone)


def test_all_rows_are_in_one_tile_of_their_slot():
    rows = torch.tensor([3, -1, 3, 0] + [5] * 37 + [-1, 0], dtype=torch.int32)
    tiles = AdapterTiles(CPU, 64, NUM_SLOTS)
    tiles.set(rows)
    found = []
    most = tiles.most_tiles(len(rows))
    for slot, first, end in tiles.of_slots:
        assert int(end) - int(first) <= 16
        for place in range(int(first), int(end)):
            assert rows[tiles.order[place]] == slot
            found.append(int(tiles.order[place]))
    assert sorted(found) == (rows >= 0).nonzero().flatten().tolist()
    assert not tiles.of_slots[most:].any()
    addresses = [each.data_ptr() for each in (tiles.order, tiles.of_slots)]
    tiles.set(torch.full((5,), -1, dtype=torch.int32))
    assert not tiles.has_rows and not tiles.of_slots.any()
    assert addresses == [each.data_ptr() for each in (tiles.order, tiles.of_slots)]


def test_other_rows_are_named():
    weights, tiles = filled(40, torch.float32), AdapterTiles(CPU, 8, NUM_SLOTS)
    tiles.set(torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="x has 3 rows, but adapters were set for 2"):
        add_adapters(torch.ones(3, 40), torch.ones(3, 154), weights, tiles)
    with pytest.raises(ValueError, match=r"must be \[any, 40\] torch.float32"):
        add_adapters(torch.ones(2, 41), torch.ones(2, 154), weights, tiles)
    with pytest.raises(ValueError, match="9 rows, but tiles were made for 8"):
        tiles.set(torch.zeros(9, dtype=torch.int32))
