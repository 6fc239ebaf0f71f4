"""The torch backend against the oracle, over random paged pools.

Tolerances: all arithmetic is fp32 on values that the KV dtype holds exactly, so outputs (means of
standard normals) agree with float64 to 2e-6, whatever the KV dtype. Every byte of the pool that no
sequence wrote is NaN: reading one shows.
"""

import random

import pytest
import torch
from tests.attention.paged import NUM_SPARE_ROWS, POISON, PagedStep, kv_of, make_spec

from quire.attention.interface import AttentionSpec
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.step import HOLE_BLOCK
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "window of one": {"window": 1},
    "cap": {"soft_cap": 5.0},
    "sinks": {"has_sinks": True},
    "scale": {"scale": 0.2},
    "encoder": {"causal": False},
    "encoder window": {"causal": False, "window": 30},
    "all": {"window": 70, "soft_cap": 3.0, "has_sinks": True, "scale": 0.2},
    "encoder all": {"causal": False, "window": 70, "soft_cap": 3.0, "has_sinks": True},
}
EDGES = [1, 15, 16, 17, 63, 64, 65, 128, 129, 300]


def make_step(specs, contexts, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    return PagedStep(TorchPagedAttention(), specs, contexts, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(name):
    contexts = [*EDGES, 1, 33, 600, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 590, 2, 17, 1]
    make_step(make_spec(**OPTIONS[name]), contexts).check(query_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128, 2048])
def test_block_sizes_and_dtypes(dtype, block_size):
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 5]
    contexts = [*edges, *(c for c in edges if c > 2)]
    query_lens = [1] * len(edges) + [min(c, 40) for c in edges if c > 2]
    spec = make_spec(2, 1, 16, window=50)
    make_step((make_spec(2, 1, 16), spec), contexts, block_size=block_size, dtype=dtype).check(
        query_lens
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(7, 1, 80), (14, 2, 96), (8, 1, 64), (3, 3, 40), (12, 4, 64), (1, 1, 128), (32, 8, 16)],
)
def test_head_counts_and_sizes(num_heads, num_kv_heads, head_dim):
    spec = make_spec(num_heads, num_kv_heads, head_dim)
    capped = make_spec(num_heads, num_kv_heads, head_dim, soft_cap=20.0)
    make_step((spec, capped), [5, 64, 200, 31, 150]).check([1, 1, 1, 31, 70])


@pytest.mark.parametrize("padding_bytes", [0, 4, 4 * 80, 1024])
@pytest.mark.parametrize("block_size", [16, 256])
def test_groups_interleave_in_one_pool(padding_bytes, block_size):
    """Two groups with their own tables; layers of one step differ in all that a layer may."""
    specs = (
        make_spec(4, 2, 40),
        make_spec(4, 2, 40, window=33),
        make_spec(4, 1, 80, soft_cap=4.0),
        make_spec(4, 2, 40, window=33, has_sinks=True),
    )
    step = make_step(
        specs,
        [1, 70, 100, 130, 20],
        groups=(0, 1, 0, 1),
        padding_bytes=padding_bytes,
        block_size=block_size,
    )
    step.check([1, 1, 1, 60, 20])


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries(q_dtype):
    """The result is rounded to the query's dtype and not before."""
    step = make_step(make_spec(), [40, 100, 90], dtype=q_dtype, q_dtype=q_dtype)
    step.fill([39, 99, 50])
    (out,) = step.run_all([1, 1, 40])
    expected = step.expected(0, [1, 1, 40])
    assert out.dtype == q_dtype
    ulp = torch.finfo(q_dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0.51 * ulp)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_chunked_equals_whole(name, size):
    """Through the backend's own writes: each chunk attends what earlier chunks stored."""
    spec = make_spec(**OPTIONS[name])
    total = 260 if size > 1 else 90
    whole = make_step(spec, [total])
    (expected,) = whole.run_all([total])
    step = make_step(spec, [total])
    parts = []
    for end in [*range(size, total, size), total]:
        start = parts[-1][0] if parts else 0
        parts.append((end, step.run_all([end - start], [end])[0]))
    out = torch.cat([part for _, part in parts])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(step.storage, whole.storage)


def test_chunks_longer_than_a_tile():
    contexts, query_lens = [2500, 2300], [2500, 2100]
    make_step((make_spec(2, 1, 16), make_spec(2, 1, 16, window=500)), contexts).check(
        query_lens, tolerance=5e-6
    )


@pytest.mark.parametrize("block_size", [8, 16])
def test_long_contexts(block_size):
    """Tables of thousands of entries beside a short row."""
    specs = (make_spec(2, 1, 16), make_spec(2, 1, 16, window=4096))
    step = make_step(specs, [32_768, 20_001, 3, 32_000], block_size=block_size)
    step.check([1, 1, 1, 20], tolerance=5e-6)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed):
    rng = random.Random(seed)
    group_size, num_kv_heads = rng.choice([1, 2, 3, 7]), rng.choice([1, 2, 4])
    options = {
        "window": rng.choice([None, rng.randint(1, 300)]),
        "soft_cap": rng.choice([None, 10.0]),
        "has_sinks": rng.random() < 0.3,
        "causal": rng.random() < 0.8,
    }
    heads = (group_size * num_kv_heads, num_kv_heads, rng.choice([40, 64, 80, 96]))
    num_decodes, num_chunks = rng.randint(0, 12), rng.randint(0, 3)
    contexts = [int(rng.lognormvariate(4, 1.2)) + 1 for _ in range(num_decodes + num_chunks)]
    query_lens = [1] * num_decodes + [rng.randint(1, c) for c in contexts[num_decodes:]]
    step = make_step(
        make_spec(*heads, **options),
        contexts or [3],
        block_size=rng.choice([8, 16, 64]),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
        seed=seed,
    )
    step.check(query_lens or [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80), (3, 3, 40), (12, 4, 64)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_decode_row_is_the_same_alone_to_the_bit(dtype, heads, num_threads):
    contexts = [1, 64, 300, 17, 500, 1000, 65]
    step = make_step((make_spec(*heads), make_spec(*heads, window=90)), contexts, dtype=dtype)
    step.fill([c - 1 for c in contexts])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        crowd = step.run_all([1] * len(contexts))
        for i in range(len(contexts)):
            order = [i]
            alone = step.run_all([1] * len(contexts), order=order)
            for out, own in zip(crowd, alone, strict=True):
                assert torch.equal(out[i], own[0])
    finally:
        torch.set_num_threads(before)


def test_a_decode_row_is_the_same_beside_chunks_and_in_any_order_to_the_bit():
    contexts = [64, 300, 17, 500, 200, 90]
    query_lens = [1, 1, 1, 1, 150, 90]
    step = make_step(make_spec(), contexts)
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    (out,) = step.run_all(query_lens)
    (shuffled,) = step.run_all(query_lens, order=[3, 1, 0, 2, 5, 4])
    assert torch.equal(shuffled[:4], out[[3, 1, 0, 2]])
    torch.testing.assert_close(shuffled[4:94], out[154:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("padding_bytes", [0, 12])
def test_only_the_steps_slots_are_written(padding_bytes):
    specs = (make_spec(4, 2, 40), make_spec(4, 2, 40))
    step = make_step(specs, [33, 70, 50], groups=(0, 1), padding_bytes=padding_bytes)
    step.fill([32, 69, 30])
    expected = step.storage.clone()
    step.run_all([1, 1, 20])
    written = step.storage.clone()
    step.storage.copy_(expected)
    step.fill([33, 70, 50])
    assert torch.equal(written, step.storage)
    assert not torch.equal(written, expected)


def test_the_table_is_not_read_beyond_a_row_or_below_its_window():
    """Ids outside the pool stand there and in the other rows: reading one raises."""
    step = make_step(make_spec(window=20), [200, 100, 90, 500])
    query_lens = [1, 1, 5, 300]
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])
    batch = step.batch(query_lens)
    tables = batch.groups[0].block_tables
    assert batch.rows_list != sorted(batch.rows_list)
    assert (tables == POISON).all(dim=1).sum() == NUM_SPARE_ROWS
    for row, context, n in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        assert (tables[row, -(-context // 16) :] == POISON).all()
        tables[row, : max(0, context - n - 19) // 16] = HOLE_BLOCK
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    expected = step.expected(0, query_lens)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


def test_non_contiguous_inputs():
    """Models pass slices of one fused projection."""
    step = make_step(make_spec(), [20, 30])
    step.fill([19, 20])
    q, k, v, *_ = step.inputs(0, [1, 10])
    fused = torch.cat([q, k, v], dim=1)
    (expected,) = step.run_all([1, 10])
    assert torch.equal(
        step.backend.run(0, AttentionInputs(*fused.split([4, 2, 2], dim=1))), expected
    )


def test_a_backend_serves_steps_of_any_shape_in_turn():
    step = make_step(make_spec(), [40, 2000, 3])
    for query_lens in ([40, 2000, 3], [1, 1, 1], [1, 1900, 2], [1, 1, 3]):
        step.check(query_lens)


@pytest.mark.parametrize("block_size", [0, -16, 4, 12, 17, 4096])
def test_a_block_size_that_cannot_be_served_is_refused(block_size):
    with pytest.raises(ConfigurationError, match=f"block_size={block_size} is not a power of two"):
        TorchPagedAttention.page_format(make_spec(), block_size, kv_of(torch.float32))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigurationError, match="num_heads=7 is not a multiple of num_kv_heads=2"):
        TorchPagedAttention.page_format(AttentionSpec(7, 2, 64, 1.0), 16, kv_of(torch.float32))


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_page_format(dtype, itemsize):
    page_format = TorchPagedAttention.page_format(make_spec(4, 2, 80), 16, kv_of(dtype))
    assert page_format.bytes_per_layer == 2 * 16 * 2 * 80 * itemsize
    assert (page_format.block_size, page_format.dtype) == (16, dtype)
