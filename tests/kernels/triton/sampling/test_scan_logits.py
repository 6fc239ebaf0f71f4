"""Largest logits against torch, ties and odd values included."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.sampling.scan_logits import GROUP, TILE, Scan, kth_largest, scan_logits

INF = float("inf")
CPU = torch.device("cpu")


def scanned(logits: torch.Tensor) -> Scan:
    scan = Scan.empty(logits.shape, CPU)
    scan_logits(logits, scan)
    return scan


@pytest.mark.parametrize("vocab_size", [1, GROUP, 1000, TILE, 2 * TILE + 17])
def test_the_largest_of_tiles_and_groups(vocab_size: int) -> None:
    logits = torch.randn((2, vocab_size), generator=torch.Generator().manual_seed(0))
    logits[0] = (logits[0] * 2).round()
    scan = scanned(logits)
    for line, tile in np.ndindex(*scan.tile_largest.shape):
        part = logits[line, tile * TILE : (tile + 1) * TILE].numpy()
        assert scan.tile_largest[line, tile] == part.max()
        assert scan.tile_token[line, tile] == tile * TILE + part.argmax()
    groups = [part.amax(1) for part in logits.split(GROUP, 1)]
    assert torch.equal(scan.group_largest, torch.stack(groups, 1))


def test_a_nan_is_infinite_and_zeros_are_equal() -> None:
    logits = torch.tensor([[1.0, float("nan"), 2.0], [-1.0, -0.0, 0.0], [-INF, -INF, -INF]])
    scan = scanned(logits)
    assert scan.tile_largest.flatten().tolist() == [INF, 0.0, -INF]
    assert scan.tile_token.flatten().tolist() == [1, 1, 0]


def assert_kth(logits: torch.Tensor, k: list[int]) -> None:
    found = torch.empty(len(k))
    kth_largest(logits, scanned(logits), torch.tensor(k, dtype=torch.int32), found)
    ranked = logits.sort(dim=1, descending=True).values
    expected = [float(line[min(n, len(line)) - 1]) if n > 0 else -INF
                for line, n in zip(ranked, k, strict=True)]  # fmt: skip
    assert found.tolist() == expected


def test_the_kth_largest() -> None:
    """Within one group, over many groups, beyond their number, beyond what is counted at once."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((7, 20 * GROUP + 5), generator=generator) * 30
    logits[3] = logits[3].sort(descending=True).values  # the best lie in few groups
    logits[4] = (logits[4] / 20).round()  # many tie
    assert_kth(logits, [1, 5, 21, 300, 40, 1285, 0])


def test_the_kth_largest_of_odd_values() -> None:
    tiny = 2.0**-149
    values = [-0.0, 0.0, tiny, -tiny, INF, -INF, 3e38, -3e38, 1.0, 1.0]
    logits = torch.tensor([values] * len(values))
    assert_kth(logits, list(range(1, len(values) + 1)))
