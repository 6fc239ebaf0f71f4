"""Parts put together, against one softmax over all their keys in float64.

Tolerance: a part's accumulator is rounded to fp32 once, and each fold once more: 1e-6 of values of
a few units, over three folds.
"""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.attention.merge_parts import merge_parts

NUM_HEADS, HEAD_DIM, NUM_KEYS = 3, 20, 7


def make_parts(num_parts, seed=0):
    """(parts, scales, scores [num_parts * NUM_KEYS, Hq], values) of one token, in units of log2."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_parts, NUM_KEYS, NUM_HEADS, generator=generator) * 3
    values = torch.randn(num_parts, NUM_KEYS, NUM_HEADS, HEAD_DIM, generator=generator)
    m = scores.amax(1)
    weights = torch.exp2(scores - m[:, None])
    parts = torch.einsum("pkh,pkhd->phd", weights, values)
    scales = torch.stack([m, weights.sum(1)], dim=-1)
    return parts, scales, scores.flatten(0, 1), values.flatten(0, 1)


def expected(scores, values, sinks):
    natural = scores.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
    columns = natural if sinks is None else torch.cat([natural, sinks.double()[None]])
    lse = torch.logsumexp(columns, 0)
    return torch.einsum("kh,khd->hd", torch.exp(natural - lse), values.double()), lse


@pytest.mark.parametrize("num_parts", [1, 3, 8, 9])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_are_one_softmax(num_parts, has_sinks):
    parts, scales, scores, values = make_parts(num_parts)
    sinks = torch.tensor([0.5, -3.0, 6.0]) if has_sinks else None
    out, lse = torch.full((2, NUM_HEADS, HEAD_DIM), 7.0), torch.full((2, NUM_HEADS), 7.0)
    before = torch.full((2, NUM_HEADS, HEAD_DIM), torch.nan)
    before_scales = torch.full((2, NUM_HEADS, 2), torch.nan)
    tokens = torch.tensor([[1, 2, num_parts, 0]], dtype=torch.int32)
    merge_parts(
        tokens, torch.cat([before, parts]), torch.cat([before_scales, scales]), sinks, out, lse
    )
    wanted, wanted_lse = expected(scores, values, sinks)
    torch.testing.assert_close(out[1].double(), wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse[1].double(), wanted_lse, atol=2e-6, rtol=2e-6)
    assert (out[0] == 7.0).all(), "another token's output"


def test_rows_written_already_are_kept_and_rows_without_parts_are_zero():
    nothing = torch.full((1, NUM_HEADS, HEAD_DIM), torch.nan)
    out = torch.full((2, NUM_HEADS, HEAD_DIM), 7.0)
    tokens = torch.tensor([[0, 0, -1, 0], [1, 0, 0, 0]], dtype=torch.int32)
    merge_parts(tokens, nothing, nothing[..., :2].contiguous(), None, out, None)
    assert (out[0] == 7.0).all()
    assert not out[1].any()


def test_parts_without_a_key_change_no_bit():
    """In front, between and behind: a uniform tile's tokens see different chunks."""
    parts, scales, *_ = make_parts(2)
    empty = torch.zeros_like(parts[:1])
    empty_scales = torch.stack([torch.full((1, NUM_HEADS), -torch.inf), empty[..., 0]], dim=-1)

    def merged(order):
        all_parts = torch.cat([[parts[:1], parts[1:], empty][i] for i in order])
        all_scales = torch.cat([[scales[:1], scales[1:], empty_scales][i] for i in order])
        out = torch.empty(1, NUM_HEADS, HEAD_DIM)
        tokens = torch.tensor([[0, 0, len(order), 0]], dtype=torch.int32)
        merge_parts(tokens, all_parts, all_scales, None, out, None)
        return out

    assert torch.equal(merged([2, 0, 2, 1, 2]), merged([0, 1]))


@pytest.mark.parametrize("num_programs", [1, 2, 9])
def test_only_the_entries_that_are_set_are_merged(num_programs):
    parts, scales, scores, values = make_parts(3)
    out = torch.full((4, NUM_HEADS, HEAD_DIM), 7.0)
    tokens = torch.tensor([[2, 0, 3, 0], [0, 0, 3, 0], [1, 0, 0, 0], [3, 0, 3, 0]])
    count = torch.tensor([3], dtype=torch.int32)
    merge_parts(tokens.to(torch.int32), parts, scales, None, out, None, count, num_programs)
    wanted, _ = expected(scores, values, None)
    for token in (0, 2):
        torch.testing.assert_close(out[token].double(), wanted, atol=1e-6, rtol=1e-6)
    assert not out[1].any() and (out[3] == 7.0).all()
