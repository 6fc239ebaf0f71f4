"""The Triton backend's plans: tiles that fit their device, work lists that cover each key once."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.attention.paged import make_spec

from quire.attention.interface import AttentionBatch

pytest.importorskip("triton")

from quire.attention import triton_plan
from quire.attention.triton_plan import (
    MIN_CHUNK_TOKENS,
    DeviceLimits,
    chunk_rule,
    decode_shape,
    host_work,
    mixed_shapes,
    num_resident,
    uniform_shape,
)

H200 = DeviceLimits(132, 228 << 10, 227 << 10, is_wide=True)
A100 = DeviceLimits(108, 164 << 10, 163 << 10, is_wide=False)
L40 = DeviceLimits(142, 100 << 10, 99 << 10, is_wide=False)
DTYPES = [torch.float32, torch.bfloat16]
SPECS = {
    "plain": make_spec(8, 2, 64),
    "window": make_spec(6, 2, 64, window=300),
    "short window": make_spec(6, 2, 64, window=5),
    "encoder": make_spec(6, 2, 64, causal=False),
    "encoder window": make_spec(6, 2, 64, causal=False, window=300),
}


def all_shapes(spec, dtype, limits):
    yield decode_shape(spec, 16, dtype, limits)
    yield from mixed_shapes(spec, 16, dtype, limits)
    yield uniform_shape(spec, 16, dtype, limits)


@pytest.mark.parametrize("limits", [H200, A100, L40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (28, 4, 128), (64, 8, 64), (32, 32, 80), (16, 8, 256), (64, 1, 128)],
)
def test_shapes_fit_their_device(limits, dtype, num_heads, num_kv_heads, head_dim):
    spec = make_spec(num_heads, num_kv_heads, head_dim)
    for shape in all_shapes(spec, dtype, limits):
        assert shape.queries >= 1
        assert shape.padded_dim in (64, 128, 256)
        assert shape.num_stages >= 2 or dtype == torch.float32, "nothing is loaded ahead"
        stage = 2 * shape.tile * shape.padded_dim * dtype.itemsize
        queries = shape.rows * shape.padded_dim * dtype.itemsize if shape.rows >= 64 else 0
        assert queries + shape.num_stages * stage < limits.program_shared_bytes
        per_processor, rest = divmod(num_resident(shape, dtype, limits), limits.num_processors)
        assert 1 <= per_processor <= 3
        assert rest == 0


def test_an_h200_decodes_with_three_programs_a_processor():
    shape = decode_shape(make_spec(32, 8, 128), 16, torch.bfloat16, H200)
    assert (shape.rows, shape.tile, shape.num_stages) == (16, 64, 3)
    assert num_resident(shape, torch.bfloat16, H200) == 3 * 132


def test_an_h200_decodes_codes_with_two_programs_a_processor():
    """Each with a tile under way and a widened one: 96 KiB."""
    shape = decode_shape(make_spec(32, 8, 128), 16, torch.int8, H200)
    assert (shape.rows, shape.tile, shape.num_warps, shape.num_stages) == (16, 128, 4, 2)
    assert num_resident(shape, torch.int8, H200) == 2 * 132


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("max_context", [200, 5000, 131_072])
def test_no_token_needs_more_parts_than_there_is_room_for(name, uniform, max_context):
    spec = SPECS[name]
    choose = uniform_shape if uniform else decode_shape
    shape = choose(spec, 16, torch.bfloat16, H200)
    rule = chunk_rule(shape, max_context)
    assert rule.chunk_tokens % shape.tile == 0
    assert (rule.chunk_tokens > 0) == uniform
    for context in {1, 255, 257, 300, 301, 1000, 4097, max_context}:
        if context <= max_context:
            host = host_work(make_batch([1], [context]), shape, rule)
            assert len(host.items) <= rule.parts_per_token


def test_one_long_sequence_makes_work_for_a_whole_gpu_and_a_short_one_for_some_programs():
    spec = make_spec(32, 8, 128)
    shape = decode_shape(spec, 16, torch.bfloat16, H200)
    rule = chunk_rule(shape, 131_072)
    num_items = [
        len(host_work(make_batch([1], [context]), shape, rule).items)
        for context in (MIN_CHUNK_TOKENS, 200, 256, 257, 1024, 1025, 2048, 8192, 131_072)
    ]
    assert num_items == [1, 4, 4, 3, 8, 5, 8, 16, 16]
    assert num_items[-1] * spec.num_kv_heads >= 128


@pytest.mark.parametrize(("group", "least"), [(1, 64), (4, 64), (8, 128), (16, 256), (64, 256)])
def test_least_tokens_of_a_part_grow_with_the_query_group(group, least):
    shape = decode_shape(make_spec(2 * group, 2, 128), 16, torch.bfloat16, H200)
    assert chunk_rule(shape, 4096).least_tokens == least


def make_batch(query_lens, contexts):
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    rows = [7 * i + 3 for i in range(len(query_lens))]
    return AttentionBatch(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        rows=torch.tensor(rows),
        query_lens_list=list(query_lens),
        context_lens_list=list(contexts),
        rows_list=rows,
        num_decodes=num_decodes,
        groups=(),
    )


def seen_keys(spec, position, context):
    """(first, end)"""
    window = spec.window or context
    end = position + 1 if spec.causal else min(context, position + window)
    return max(0, position + 1 - window), end


def check_cover(spec, shape, rule, batch, host):
    """Each token's keys are in its items once; its items write its output, or parts that its merge
    puts together in the order of the keys."""
    first_token = 0
    merges = {int(m[0]): (int(m[1]), int(m[2])) for m in host.merges}
    assert len(merges) == len(host.merges)
    for row, query_len, context in zip(
        batch.rows_list, batch.query_lens_list, batch.context_lens_list, strict=True
    ):
        for offset in range(query_len):
            token, position = first_token + offset, context - query_len + offset
            mine = [i for i in host.items if i[1] <= token < i[1] + i[2]]
            mine.sort(key=lambda i: i[4])
            assert all((i[0], i[3] + token - i[1], i[7]) == (row, position, context) for i in mine)
            assert all(i[4] % shape.tile == 0 for i in mine)
            low, end = seen_keys(spec, position, context)
            assert mine[0][4] <= low
            assert mine[-1][5] >= end
            assert all(a[5] == b[4] for a, b in pairwise(mine))
            parts = [int(i[6]) for i in mine]
            if token not in merges:
                assert parts == [-1]
                continue
            first_part, count = merges[token]
            own = [
                p + (token - i[1]) * rule.parts_per_token for p, i in zip(parts, mine, strict=True)
            ]
            assert own == list(range(first_part, first_part + count))
            assert first_part + count <= host.num_parts
        first_token += query_len


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("choose", ["mixed", "uniform"])
def test_work_lists_cover_each_key_once(name, choose):
    spec = SPECS[name]
    query_lens = [1, 1, 1, 1, 3, 40, 700, 1, 2]
    contexts = [1, 256, 257, 5000, 900, 40, 1300, 600, 2]
    batch = make_batch(query_lens, contexts)
    shape = mixed_shapes(spec, 16, torch.bfloat16, H200)[-1]
    if choose == "uniform":
        shape = uniform_shape(spec, 16, torch.bfloat16, H200)
    rule = chunk_rule(shape, 8192)
    host = host_work(batch, shape, rule)
    check_cover(spec, shape, rule, batch, host)
    assert (len(host.merges) > 0) == (name != "short window")
    costs = host.items[:, 5] - host.items[:, 4]
    assert (np.diff(costs) <= 0).all(), "the longest first"


def test_parts_beyond_the_room_for_them_are_not_made(monkeypatch):
    spec = SPECS["plain"]
    shape = mixed_shapes(spec, 16, torch.bfloat16, H200)[-1]
    rule = chunk_rule(shape, 8192)
    batch = make_batch([1, 1, 4, 2, 1], [600, 700, 800, 900, 1000])
    token_bytes = spec.num_heads * (spec.head_dim + 2) * 4 * rule.parts_per_token
    monkeypatch.setattr(triton_plan, "MAX_PART_BYTES", 3 * token_bytes)
    host = host_work(batch, shape, rule)
    check_cover(spec, shape, rule, batch, host)
    assert host.merges[:, 0].tolist() == [0, 1]
    assert host.num_parts == 2 * rule.parts_per_token
