"""Block copies in the interpreter: whole blocks, those and no others."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.attention.copy_blocks import copy_blocks
from quire.tiers.host import staged_copies
from quire.tiers.host.plain_lane import PlainLane
from quire.tiers.host.staged_copies import StagedCopies


def _storage(num_blocks, num_bytes, distance=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = num_blocks, distance or num_bytes
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)[:, :num_bytes]


@pytest.mark.parametrize("num_bytes", [64, 4096, 16384, 16384 + 64, 40000])
def test_copies_whole_blocks_within_a_storage(num_bytes):
    storage = _storage(7, num_bytes)
    before = storage.clone()
    copy_blocks(storage, storage, torch.tensor([[1, 4], [0, 6], [1, 2]]))
    assert torch.equal(storage, before[[0, 1, 1, 3, 1, 5, 0]])


def test_moves_between_storages_whose_blocks_lie_apart():
    source, target = _storage(3, 192, distance=256), _storage(5, 192, distance=208, seed=1)
    before = target.clone()
    copy_blocks(source, target, torch.tensor([[2, 0], [1, 4]]))
    assert torch.equal(target[0], source[2]) and torch.equal(target[4], source[1])
    assert torch.equal(target[1:4], before[1:4])


def test_nothing_to_copy():
    storage = _storage(2, 64)
    before = storage.clone()
    copy_blocks(storage, storage, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(storage, before)


@pytest.mark.parametrize(
    ("source", "pairs", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.uint8), [[0, 1]], r"target is \(2, 64\) .* \[any, 32\]"),
        (torch.zeros(2, 64), [[0, 1]], r"source is \(2, 64\) torch.float32"),
        (torch.zeros(2, 72, dtype=torch.uint8)[:, 4:68], [[0, 1]], "multiples of 16"),
        (torch.zeros(2, 64, dtype=torch.uint8), [[0, 1, 2]], r"pairs are \(1, 3\)"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(source, pairs, message):
    with pytest.raises(ValueError, match=message):
        copy_blocks(source, torch.zeros(2, 64, dtype=torch.uint8), torch.tensor(pairs))


def test_the_host_tier_copies_through_a_staging_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copies, "STAGING_BYTES", 2 * 64)
    pool = torch.randint(0, 256, (9, 64), dtype=torch.uint8)
    before, host = pool.clone(), torch.zeros((6, 64), dtype=torch.uint8)
    lanes = (PlainLane(), PlainLane())
    copies = StagedCopies(pool, host, lanes, copy_blocks, lambda: None)
    blocks, slots = [7, 2, 4, 8, 0], [1, 2, 5, 3, 0]
    copies.store(blocks, slots)
    assert torch.equal(host[slots], before[blocks]) and not host[4].any()
    pool.zero_()
    copies.load(slots, blocks)
    assert torch.equal(pool[blocks], before[blocks])
    assert not pool[[1, 3, 5, 6]].any()
