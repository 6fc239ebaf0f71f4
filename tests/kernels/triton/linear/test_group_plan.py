"""Plans of the products of many experts, in the interpreter, beside torch's."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.linear.group_plan import plan_groups, wide_rows


def planned(
    ids: torch.Tensor, num_experts: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]:
    """Order, places and tiles as torch finds them."""
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1)).tolist()
    tiles = [
        (expert, first, starts[expert + 1])
        for expert in range(num_experts)
        for first in range(starts[expert], starts[expert + 1], block_rows)
    ]
    return order, places.view(ids.shape).sort(dim=1).values, tiles


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_rows"),
    [
        (1, 1, 7, 16),
        (2, 3, 7, 16),
        (50, 3, 7, 16),
        (50, 3, 5, 64),
        (1400, 3, 19, 128),
        (9, 1, 1, 16),
    ],
)
def test_plans_are_those_of_torch(
    num_tokens: int, top_k: int, num_experts: int, block_rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :top_k]
    if num_tokens == 50:
        ids[:, 0] = torch.where((ids[:, 1:] == 4).any(1), ids[:, 0], 4)  # more than a tile
    plan = plan_groups(ids, num_experts, block_rows)
    order, places, tiles = planned(ids, num_experts, block_rows)
    assert plan.block_rows == block_rows
    assert torch.equal(plan.order, order.int()) and torch.equal(plan.places, places.int())
    assert [(e, first, end) for e, first, end in plan.tiles.tolist() if first < end] == tiles


def test_a_step_without_tokens_has_no_tiles() -> None:
    plan = plan_groups(torch.zeros(0, 2, dtype=torch.int64), 4)
    assert [len(plan.order), len(plan.places), len(plan.tiles)] == [0, 0, 0]


def test_tiles_are_wide_where_experts_have_many_pairs() -> None:
    """128 experts, 8 of them for each token."""
    rows = {tokens: wide_rows(tokens * 8, 128) for tokens in (1, 256, 511, 512, 2047, 2048)}
    assert rows == {1: 16, 256: 16, 511: 16, 512: 64, 2047: 64, 2048: 128}
