"""Parts of attention and their merging, against one softmax over all keys."""

import pytest
import torch

from quire.attention import torch_attend
from quire.attention.torch_attend import (
    TileParts,
    add_sinks,
    attend_fused,
    attend_materialized,
    attend_rows,
    attend_stack,
    attend_tiles,
    merge_tiles,
    merge_two,
    pack_queries,
    stacks_exactly,
)

NEVER = float("-inf")


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax_attention(q, k, v, scale, mask):
    """float64: q [b, h, m, D], k, v [b, h, l, D]."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale + mask
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def assert_part_close(part, expected, atol=2e-6):
    for actual, wanted in zip(part, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=atol, rtol=2e-6)


@pytest.mark.parametrize("hidden_by", ["nothing", "causality", "mask"])
def test_fused_and_materialized_agree(hidden_by):
    q, k, v = (random_tensor(2, 3, 40, 24, seed=i) for i in range(3))
    hidden = torch.zeros(40, 40)
    if hidden_by == "causality":
        hidden = torch.full((40, 40), NEVER).triu(1)
    if hidden_by == "mask":
        hidden = hidden.masked_fill_(random_tensor(40, 40) > 1, NEVER)
    expected = softmax_attention(q, k, v, 0.3, hidden)
    is_causal, mask = hidden_by == "causality", hidden if hidden_by == "mask" else None
    assert_part_close(attend_fused(q, k, v, 0.3, is_causal, mask), expected)
    assert_part_close(attend_materialized(q, k, v, 0.3, is_causal, mask, None), expected)


def test_soft_cap():
    q, k, v = (random_tensor(1, 2, 5, 8, seed=i) for i in range(3))
    scores = 2.0 * torch.tanh(q.double() @ k.double().transpose(-1, -2) * 3.0 / 2.0)
    expected = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    assert_part_close(attend_materialized(q, k, v, 3.0, False, None, 2.0), expected)


def test_a_blind_query_gives_zero_and_minus_infinity():
    q, k, v = (random_tensor(1, 1, 3, 8, seed=i) for i in range(3))
    mask = torch.zeros(3, 3)
    mask[1] = NEVER
    out, lse = attend_materialized(q, k, v, 1.0, False, mask, None)
    assert out[0, 0, 1].abs().max() == 0
    assert lse[0, 0].isneginf().tolist() == [False, True, False]
    fused, _ = attend_fused(q, k, v, 1.0, False, mask)
    assert fused[0, 0, 1].abs().max() == 0


def test_merge_two_with_queries_that_are_blind_in_the_second():
    q, k, v = (
        random_tensor(1, 2, 6, 8),
        random_tensor(1, 2, 9, 8, seed=1),
        random_tensor(1, 2, 9, 8),
    )
    mask = torch.zeros(6, 9)
    mask[2, 4:] = NEVER
    first = attend_materialized(q, k[:, :, :4], v[:, :, :4], 1.0, False, None, None)
    second = attend_materialized(q, k[:, :, 4:], v[:, :, 4:], 1.0, False, mask[:, 4:], None)
    assert_part_close(merge_two(first, second), softmax_attention(q, k, v, 1.0, mask))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "packs"),
    [(1, 1, 1), (4, 2, 1), (12, 4, 2), (8, 8, 1), (32, 8, 4), (14, 2, 2), (24, 3, 3), (10, 10, 5)],
)
def test_packed_tiles_equal_plain_attention(num_heads, num_kv_heads, packs):
    head_dim, num_tiles, tile = 10, 3, 16
    group_size = num_heads // num_kv_heads
    q = random_tensor(num_tiles, num_heads, head_dim)
    k, v = random_tensor(2, num_tiles, tile, num_kv_heads, head_dim, seed=1)
    packed = pack_queries(q, num_kv_heads)
    assert packed.shape[1] == packs
    mask = torch.zeros(num_tiles, 1, tile)
    mask[1, :, 5:] = NEVER
    flat_k, flat_v = k.flatten(2), v.flatten(2)
    tiles = TileParts.empty(num_tiles * num_kv_heads, group_size, head_dim, q)
    attend_tiles(packed, flat_k, flat_v, mask, None, tiles)
    for i, crowd in enumerate(tiles.split([num_kv_heads] * num_tiles)):
        one = slice(i, i + 1)
        alone = TileParts.empty(num_kv_heads, group_size, head_dim, q)
        attend_tiles(packed[one], flat_k[one], flat_v[one], mask[one], None, alone)
        assert all(map(torch.equal, alone.tensors(), crowd.tensors()))
    num_items = num_tiles * num_kv_heads
    part = merge_tiles(tiles, torch.arange(num_items), num_items)
    heads_k, heads_v = (x.transpose(1, 2).repeat_interleave(group_size, 1) for x in (k, v))
    out, lse = softmax_attention(q[:, :, None], heads_k, heads_v, 1.0, mask[:, None])
    expected = out.view(num_items, group_size, head_dim), lse.view(num_items, group_size)
    assert_part_close(part, expected)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("num_tiles", [1, 2, 7])
@pytest.mark.parametrize("attend", [attend_stack, attend_rows])
def test_all_rows_with_all_tiles(attend, num_tiles, soft_cap):
    """For 3 rows, 2 KV heads of 4 query heads: the items are [Hkv, tiles, rows]."""
    q, k, v = random_tensor(3, 2, 4, 10), *random_tensor(2, num_tiles, 16, 20, seed=1)
    out = TileParts.empty(2 * num_tiles * 3, 4, 10, q)
    attend(q, k, v, soft_cap, out)
    keys, values = (x.view(num_tiles, 16, 2, 10).double() for x in (k, v))
    scores = torch.einsum("rhgd,tlhd->htrgl", q.double(), keys)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    peak = scores.amax(-1)
    probs = (scores - peak[..., None]).exp()
    acc = torch.einsum("htrgl,tlhd->htrgd", probs, values)
    assert_part_close((out.acc, out.mass), (acc.view(-1, 4, 10), probs.sum(-1).view(-1, 4)), 1e-5)
    assert_part_close((out.peak,), (peak.view(-1, 4),))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim"), [(2, 2, 64), (2, 7, 64), (1, 1, 128)]
)
def test_stacks_are_used_only_where_they_give_the_same_bits(
    num_kv_heads, group_size, head_dim, num_threads
):
    """What was found with other numbers and as few tiles holds for these."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (2, 5, 17):
            shape = num_kv_heads, group_size, head_dim
            is_exact = stacks_exactly(num_rows, *shape, num_threads)
            q = random_tensor(num_rows, *shape, seed=7) * head_dim**-0.5
            k, v = random_tensor(2, 11, 32, num_kv_heads * head_dim, seed=8)
            stack, rows = (
                TileParts.empty(num_kv_heads * 11 * num_rows, group_size, head_dim, q) for _ in "sr"
            )
            attend_stack(q, k, v, None, stack)
            attend_rows(q, k, v, None, rows)
            assert all(map(torch.equal, stack.tensors(), rows.tensors())) or not is_exact
            assert_part_close(
                (stack.acc, stack.mass), (rows.acc.double(), rows.mass.double()), 2e-5
            )
    finally:
        torch.set_num_threads(before)


def test_stacks_that_change_a_bit_are_noticed(monkeypatch):
    def one_bit_off(q, k, v, soft_cap, out):
        attend_stack(q, k, v, soft_cap, out)
        out.acc[-1, -1, -1] = torch.nextafter(out.acc[-1, -1, -1], torch.tensor(9.0))

    shape = (8, 2, 7, 64)
    args = (*shape, 10**6)  # a key of its own in the cache
    monkeypatch.setattr(torch_attend, "attend_stack", one_bit_off)
    assert not stacks_exactly(*args)


def test_merged_tiles_do_not_depend_on_what_lies_between_them():
    acc, mass, peak = random_tensor(7, 2, 4), random_tensor(7, 2).exp(), random_tensor(7, 2) * 9
    rows = torch.tensor([0, 1, 0, 2, 0, 1, 2])
    out, lse = merge_tiles(TileParts(acc.clone(), mass, peak), rows, 3)
    total = (acc * peak.exp()[..., None]).double()
    for row in range(3):
        own = rows == row
        alone = merge_tiles(
            TileParts(acc[own], mass[own], peak[own]), torch.zeros_like(rows[own]), 1
        )
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], lse[row])
        weight = (mass * peak.exp()).double()[own].sum(0)
        assert_part_close((out[row], lse[row]), (total[own].sum(0) / weight[:, None], weight.log()))


def test_sinks_join_the_softmax():
    scores, values = random_tensor(5), random_tensor(5, 4, seed=1)
    sink = torch.tensor([0.7])
    probs = torch.cat([scores, sink]).softmax(0)[:5]
    out, lse = add_sinks(
        ((scores.softmax(0) @ values).view(1, 1, 4), scores.logsumexp(0).view(1, 1)), sink
    )
    torch.testing.assert_close(out[0, 0], probs @ values)
    torch.testing.assert_close(lse[0, 0], torch.cat([scores, sink]).logsumexp(0))
