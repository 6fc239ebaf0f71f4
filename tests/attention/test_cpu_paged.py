"""The native backend against the oracle, over random paged pools, for each instruction set.

Bounds. fp32: as for the torch backend, 2e-6 for outputs (means of standard normals).
bf16: queries, keys and values are what the oracle has, to the bit; outputs are
rounded (half an ulp, 2^-9 of the value). Where the processor multiplies bf16, probabilities are
rounded too, by at most 2^-9 each: a mean of values of which the greatest is below 5 moves by less
than 2^-8.

Every byte of the pool that no sequence wrote is NaN: reading one shows.
"""

import random

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import NUM_SPARE_ROWS, POISON, kv_of, make_spec
from tests.attention.test_torch_paged import EDGES, OPTIONS
from tests.pairwise import pairwise

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.interface import AttentionSpec
from quire.core.step import HOLE_BLOCK
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.options import NATIVE_KERNELS

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


def make_step(kernels, specs, contexts, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    return NativeStep(CpuPagedAttention(kernels), specs, contexts, **options)


def check(step, query_lens):
    return step.check(query_lens, BOUNDS[step.dtype])


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(kernels, name, dtype):
    contexts = [*EDGES, 1, 33, 290, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 280, 2, 17, 1]
    check(make_step(kernels, make_spec(**OPTIONS[name]), contexts, dtype=dtype), query_lens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128, 2048])
def test_block_sizes(kernels, dtype, block_size):
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 5]
    contexts = [*edges, *(c for c in edges if c > 2)]
    query_lens = [1] * len(edges) + [min(c, 40) for c in edges if c > 2]
    specs = (make_spec(2, 1, 16), make_spec(2, 1, 16, window=50))
    step = make_step(kernels, specs, contexts, block_size=block_size, dtype=dtype)
    check(step, query_lens)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        *[(7, 1, 80), (14, 2, 96), (8, 1, 64), (3, 3, 40), (12, 4, 64), (1, 1, 128), (32, 8, 16)],
        *[(2, 1, 256), (5, 5, 10), (40, 1, 2), (26, 2, 24)],
    ],
)
def test_head_counts_and_sizes(kernels, num_heads, num_kv_heads, head_dim, dtype):
    """Up to more query heads of one KV head than are computed at once."""
    spec = make_spec(num_heads, num_kv_heads, head_dim)
    capped = make_spec(num_heads, num_kv_heads, head_dim, soft_cap=20.0)
    contexts = [5, 64, 200, 31, 150, 300]
    step = make_step(kernels, (spec, capped), contexts, dtype=dtype)
    check(step, [1, 1, 1, 31, 70, 5])


@pytest.mark.parametrize("padding_bytes", [0, 4, 1024])
@pytest.mark.parametrize("block_size", [16, 256])
def test_groups_interleave_in_one_pool(best, padding_bytes, block_size):
    """Two groups with their own tables; layers of one step differ in all that a layer may."""
    specs = (
        make_spec(4, 2, 40),
        make_spec(4, 2, 40, window=33),
        make_spec(4, 1, 80, soft_cap=4.0),
        make_spec(4, 2, 40, window=33, has_sinks=True),
    )
    step = make_step(
        best,
        specs,
        [1, 70, 100, 130, 20],
        groups=(0, 1, 0, 1),
        padding_bytes=padding_bytes,
        block_size=block_size,
    )
    check(step, [1, 1, 1, 60, 20])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(best, seed, dtype):
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
        best,
        make_spec(*heads, **options),
        contexts or [3],
        block_size=rng.choice([8, 16, 64]),
        dtype=dtype,
        seed=seed,
    )
    check(step, query_lens or [3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_and_a_great_scale(best, dtype):
    """Scores of up to +-200: all but the greatest vanish."""
    specs = (make_spec(4, 2, 64, scale=-0.1), make_spec(4, 2, 64, scale=4.0))
    step = make_step(best, specs, [300, 100], dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-7
    step.check([1, 100], tolerance)


def test_only_the_steps_slots_are_written(kernels):
    """And they hold what the layout in tests/attention/native.py says."""
    for dtype in DTYPES:
        for block_size in (8, 32):
            specs = (make_spec(4, 2, 40), make_spec(4, 2, 40))
            options = {"groups": (0, 1), "padding_bytes": 12, "dtype": dtype}
            step = make_step(kernels, specs, [33, 70, 50], block_size=block_size, **options)
            step.fill([32, 69, 30])
            expected = step.storage.clone()
            step.run_all([1, 1, 20])
            written = step.storage.clone()
            step.storage.copy_(expected)
            step.fill([33, 70, 50])
            assert torch.equal(written, step.storage)
            assert not torch.equal(written, expected)


def test_the_table_is_not_read_beyond_a_row_or_below_its_window(best):
    """Ids outside the pool stand there and in the other rows: reading one ends the process."""
    step = make_step(best, make_spec(window=20), [200, 100, 90, 500])
    query_lens = [1, 1, 5, 300]
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])
    batch = step.batch(query_lens)
    tables = batch.groups[0].block_tables
    assert (tables == POISON).all(dim=1).sum() == NUM_SPARE_ROWS
    for row, context, n in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        assert (tables[row, -(-context // 16) :] == POISON).all()
        tables[row, : max(0, context - n - 19) // 16] = HOLE_BLOCK
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    expected = step.expected(0, query_lens)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


def test_run_takes_non_contiguous_inputs(best):
    """Models pass slices of one fused projection."""
    step = make_step(best, make_spec(), [20, 30])
    step.fill([19, 20])
    q, k, v, *_ = step.inputs(0, [1, 10])
    (expected,) = step.run_all([1, 10])
    fused = torch.cat([q, k, v], dim=1)
    assert torch.equal(
        step.backend.run(0, AttentionInputs(*fused.split([4, 2, 2], dim=1))), expected
    )
    by_heads = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(step.backend.run(0, AttentionInputs(*by_heads)), expected)
    wide_v = torch.cat([v, v], dim=1)[:, :2]
    assert torch.equal(step.backend.run(0, AttentionInputs(q, k, wide_v)), expected)


def test_a_backend_serves_steps_of_any_shape_in_turn(best):
    step = make_step(best, make_spec(), [40, 700, 3])
    for query_lens in ([40, 700, 3], [1, 1, 1], [1, 600, 2], [1, 1, 3]):
        check(step, query_lens)


def test_long_contexts(best):
    """Tables of thousands of entries beside a short row."""
    specs = (make_spec(2, 1, 16), make_spec(2, 1, 16, window=4096))
    step = make_step(best, specs, [32_768, 3, 20_001], block_size=32)
    step.check([1, 1, 20], tolerance=5e-6)


@pytest.mark.parametrize("block_size", [0, -16, 4, 12, 17, 4096])
def test_a_block_size_that_cannot_be_served_is_refused(block_size):
    with pytest.raises(ConfigurationError, match=f"block_size={block_size} is not a power of two"):
        CpuPagedAttention.page_format(make_spec(), block_size, kv_of(torch.float32))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float16, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_served_is_refused(dtype):
    with pytest.raises(
        ConfigurationError,
        match=r"KV format .* can't be served; choose one of float32, bfloat16, int8$",
    ):
        CpuPagedAttention.page_format(make_spec(), 16, kv_of(dtype))


def test_heads_that_cannot_be_served_are_refused():
    with pytest.raises(ConfigurationError, match="num_heads=7 is not a multiple of num_kv_heads=2"):
        CpuPagedAttention.page_format(AttentionSpec(7, 2, 64, 1.0), 16, kv_of(torch.float32))
    with pytest.raises(ConfigurationError, match="head_dim=65 is odd"):
        CpuPagedAttention.page_format(AttentionSpec(4, 2, 65, 1.0), 16, kv_of(torch.float32))


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_page_format(dtype, itemsize):
    page_format = CpuPagedAttention.page_format(make_spec(4, 2, 80), 16, kv_of(dtype))
    assert page_format.bytes_per_layer == 2 * 16 * 2 * 80 * itemsize
    assert (page_format.block_size, page_format.dtype) == (16, dtype)
