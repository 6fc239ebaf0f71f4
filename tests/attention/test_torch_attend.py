"""Parts of attention and their merging, against one softmax over all keys."""

import pytest
import torch

from quire.attention.torch_attend import (
    TileParts,
    add_sinks,
    attend_fused,
    attend_materialized,
    attend_tiles,
    merge_tiles,
    merge_two,
    pack_queries,
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
    tiles = attend_tiles(packed, flat_k, flat_v, head_dim, mask, None)
    part = merge_tiles(tiles, torch.arange(num_tiles), num_tiles)
    heads_k, heads_v = (x.transpose(1, 2).repeat_interleave(group_size, 1) for x in (k, v))
    out, lse = softmax_attention(q[:, :, None], heads_k, heads_v, 1.0, mask[:, None])
    assert_part_close(part, (out[:, :, 0], lse[:, :, 0]))
    for i in range(num_tiles):
        alone = attend_tiles(
            packed[i : i + 1], flat_k[i : i + 1], flat_v[i : i + 1], head_dim, mask[i : i + 1], None
        )
        assert torch.equal(alone.acc[0], tiles.acc[i])
        assert torch.equal(alone.mass[0], tiles.mass[i])
        assert torch.equal(alone.peak[0], tiles.peak[i])


def test_merged_tiles_do_not_depend_on_what_lies_between_them():
    acc, mass, peak = random_tensor(7, 2, 4), random_tensor(7, 2).exp(), random_tensor(7, 2) * 9
    rows = torch.tensor([0, 1, 0, 2, 0, 1, 2])
    out, lse = merge_tiles(TileParts(acc, mass, peak), rows, 3)
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
