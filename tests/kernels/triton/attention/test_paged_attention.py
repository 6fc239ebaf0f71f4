"""The attention kernel by itself: items that nobody's plan makes, and inputs that it can't take.

That it attends rightly is shown in `tests/attention/test_triton_paged.py`, through the backend.
"""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from tests.attention.paged import make_spec
from tests.attention.test_triton_plan import H200

from quire.attention.reference import attend_dense

pytest.importorskip("triton")

from quire.attention.triton_plan import decode_shape
from quire.kernels.triton.attention.merge_parts import merge_parts
from quire.kernels.triton.attention.paged_attention import AttendWork, KVPages, paged_attention

SPEC = make_spec(4, 2, 16)
SHAPE = decode_shape(SPEC, 8, torch.float32, H200)
TABLE = torch.tensor([[3, 1, 2]], dtype=torch.int32)


def make_work(*items, num_programs=1):
    merges = torch.zeros(0, 4, dtype=torch.int32)
    return AttendWork(
        torch.tensor(items, dtype=torch.int32),
        torch.tensor([len(items)], dtype=torch.int32),
        num_programs,
        torch.empty(0, 4, 16),
        torch.empty(0, 4, 2),
        merges,
        merges.new_zeros(0, SHAPE.num_head_tiles),
        1,
        0,
    )


def make_inputs():
    """q of 2 tokens, K and V of 20, and the pages that hold them by TABLE."""
    q, k, v = (
        torch.randn(n, heads, 16, generator=torch.Generator().manual_seed(seed))
        for seed, (n, heads) in enumerate([(2, 4), (20, 2), (20, 2)])
    )
    pages = torch.full((4, 2, 2, 8, 16), torch.nan)
    for number, block in enumerate(TABLE[0].tolist()):
        tokens = slice(8 * number, min(8 * number + 8, 20))
        count = tokens.stop - tokens.start
        pages[block, 0, :, :count] = k[tokens].transpose(0, 1)
        pages[block, 1, :, :count] = v[tokens].transpose(0, 1)
    return q, k, v, pages


@pytest.mark.parametrize("num_programs", [1, 3, 100])
def test_any_number_of_programs_does_all_items(num_programs):
    """Several items a program, and programs without one."""
    q, k, v, pages = make_inputs()
    work = make_work(
        (0, 1, 1, 19, 0, 20, -1, 20), (0, 0, 1, 18, 0, 19, -1, 19), num_programs=num_programs
    )
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 4), torch.nan)
    paged_attention(q, KVPages(pages), TABLE, work, None, out, lse, SHAPE)
    expected, expected_lse = attend_dense(SPEC, q, k, v)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-6, rtol=5e-6)


def test_only_the_tokens_of_items_are_written():
    q, _, _, pages = make_inputs()
    out = torch.full_like(q, 7.0)
    work = make_work((0, 1, 1, 19, 0, 20, -1, 20))
    paged_attention(q, KVPages(pages), TABLE, work, None, out, None, SHAPE)
    assert (out[0] == 7.0).all()
    assert (out[1] != 7.0).all()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_are_merged_as_by_the_separate_kernel_to_the_bit(has_sinks):
    """A tile of two tokens in three parts, which end in any order."""
    q, _, _, pages = make_inputs()
    sinks = torch.tensor([0.5, -3.0, 6.0, 0.0]) if has_sinks else None
    parts, scales = torch.full((8, 4, 16), torch.nan), torch.full((8, 4, 2), torch.nan)
    merges = torch.tensor([[0, 0, 3, 0], [1, 4, 3, 0]], dtype=torch.int32)
    ranges = [(0, 8), (8, 16), (16, 20)]
    items = [(0, 0, 2, 18, *keys, part, 20) for part, keys in enumerate(ranges)]
    memory = {"parts": parts, "scales": scales, "merges": merges, "parts_per_token": 4}
    expected, expected_lse = torch.full_like(q, torch.nan), torch.full((2, 4), torch.nan)
    apart = replace(make_work(*items), counters=None, **memory)
    paged_attention(q, KVPages(pages), TABLE, apart, sinks, expected, expected_lse, SHAPE)
    assert expected.isnan().all(), "nothing is merged without counters"
    merge_parts(merges, parts, scales, sinks, expected, expected_lse)
    counters = torch.zeros(2, SHAPE.num_head_tiles, dtype=torch.int32)
    for order in permutations(items):
        work = replace(make_work(*order), counters=counters, **memory)
        parts.fill_(torch.nan)
        out, lse = torch.full_like(q, torch.nan), torch.full((2, 4), torch.nan)
        paged_attention(q, KVPages(pages), TABLE, work, sinks, out, lse, SHAPE)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert not counters.any(), "the next launch counts from zero"


def test_queries_that_do_not_lie_side_by_side_are_refused():
    q, _, _, pages = make_inputs()
    work = make_work((0, 1, 1, 19, 0, 20, -1, 20))
    apart = q.repeat(1, 2, 1)[:, ::2]
    with pytest.raises(ValueError, match=r"q is \(2, 4, 16\), strides .* side by side"):
        paged_attention(apart, KVPages(pages), TABLE, work, None, q, None, SHAPE)
    with pytest.raises(ValueError, match=r"must be \[T, 8, 16\]"):
        shape = replace(SHAPE, num_heads=8)
        paged_attention(q, KVPages(pages), TABLE, work, None, q, None, shape)


def test_pages_of_another_layout_are_refused():
    q, _, _, pages = make_inputs()
    work = make_work((0, 1, 1, 19, 0, 20, -1, 20))
    with pytest.raises(ValueError, match=r"each must be \(2, 2, 8, 16\)"):
        paged_attention(q, KVPages(pages.transpose(2, 3)), TABLE, work, None, q, None, SHAPE)
