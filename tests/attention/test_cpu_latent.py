"""Latent layers by the native kernels: against the oracle, and the law that no bit changes.

Bounds are those of `test_cpu_paged.py` for heads of up to 256, and grow with larger ones: a score
is one sum, product by product. Every byte of the pool that no sequence wrote is NaN.
"""

import random

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import kv_of
from tests.attention.test_cpu_paged import BOUNDS, DTYPES
from tests.attention.test_latent import make_latent
from tests.attention.test_torch_paged import EDGES, OPTIONS
from tests.pairwise import pairwise

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.interface import AttentionSpec
from quire.core.step import HOLE_BLOCK
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.options import NATIVE_KERNELS

SPECS = (make_latent(5), make_latent(17, window=200, soft_cap=4.0, has_sinks=True))


def make_step(kernels, specs, contexts, **options):
    specs = (specs,) if isinstance(specs, AttentionSpec) else specs
    return NativeStep(CpuPagedAttention(kernels), specs, contexts, **options)


def check(step, query_lens):
    sizes = max(1.0, max(spec.head_dim for spec in step.specs) / 256)
    return step.check(query_lens, BOUNDS[step.dtype] * sizes)


def fill_all_but(step, query_lens):
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])


def assert_equal(first, second):
    for out, other in zip(first, second, strict=True):
        assert torch.equal(out, other)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(kernels, name, dtype):
    contexts = [*EDGES, 1, 33, 290, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 280, 2, 17, 1]
    (out,) = check(
        make_step(kernels, make_latent(**OPTIONS[name]), contexts, dtype=dtype), query_lens
    )
    assert out.shape[1:] == (5, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 64, 2048])
def test_block_sizes(kernels, dtype, block_size):
    edges = [1, block_size - 1, block_size + 1, 2 * block_size + 5]
    contexts = [*edges, *(c for c in edges if c > 2)]
    query_lens = [1] * len(edges) + [min(c, 40) for c in edges if c > 2]
    specs = (make_latent(2, 16, 10), make_latent(2, 16, 10, window=50))
    check(make_step(kernels, specs, contexts, block_size=block_size, dtype=dtype), query_lens)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim"),
    [
        *[(1, 2, 1), (2, 40, 32), (3, 40, 33), (7, 80, 80), (8, 66, 64), (15, 24, 17)],
        *[(16, 576, 512), (17, 130, 100), (40, 48, 31), (128, 10, 6)],
    ],
)
def test_head_counts_and_sizes(kernels, num_heads, head_dim, value_dim, dtype):
    specs = tuple(
        make_latent(num_heads, head_dim, value_dim, soft_cap=soft_cap) for soft_cap in (None, 20.0)
    )
    check(make_step(kernels, specs, [5, 64, 200, 31, 100, 290], dtype=dtype), [1, 1, 1, 31, 30, 5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(best, seed, dtype):
    rng = random.Random(seed)
    options = {
        "window": rng.choice([None, rng.randint(1, 300)]),
        "soft_cap": rng.choice([None, 10.0]),
        "has_sinks": rng.random() < 0.3,
        "causal": rng.random() < 0.8,
        "scale": rng.choice([-0.1, 0.1, 0.2]),
    }
    spec = make_latent(rng.randint(1, 40), *rng.choice([(40, 32), (64, 64), (72, 24)]), **options)
    num_decodes, num_chunks = rng.randint(0, 12), rng.randint(0, 3)
    contexts = [int(rng.lognormvariate(4, 1.2)) + 1 for _ in range(num_decodes + num_chunks)]
    query_lens = [1] * num_decodes + [rng.randint(1, c) for c in contexts[num_decodes:]]
    options = {"block_size": rng.choice([8, 16, 64]), "dtype": dtype, "seed": seed}
    check(make_step(best, spec, contexts or [3], **options), query_lens or [3])


def test_latent_layers_beside_others_in_one_pool(kernels):
    specs = (make_latent(), AttentionSpec(4, 2, 40, 0.2), make_latent(window=33))
    step = make_step(kernels, specs, [1, 70, 100, 130], groups=(0, 1, 1), padding_bytes=12)
    check(step, [1, 1, 1, 60])


def test_only_the_steps_slots_are_written(kernels):
    for dtype in DTYPES:
        for block_size in (8, 32):
            options = {"padding_bytes": 12, "dtype": dtype, "block_size": block_size}
            step = make_step(kernels, make_latent(), [33, 70, 50], **options)
            fill_all_but(step, [1, 1, 20])
            expected = step.storage.clone()
            step.run_all([1, 1, 20])
            written = step.storage.clone()
            step.storage.copy_(expected)
            step.fill([33, 70, 50])
            assert torch.equal(written, step.storage)
            assert not torch.equal(written, expected)


def test_the_table_is_not_read_below_a_window(best):
    step = make_step(best, make_latent(window=20), [200, 100, 90, 500])
    query_lens = [1, 1, 5, 300]
    fill_all_but(step, query_lens)
    batch = step.batch(query_lens)
    for row, context, n in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        batch.groups[0].block_tables[row, : max(0, context - n - 19) // 16] = HOLE_BLOCK
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    torch.testing.assert_close(out.double(), step.expected(0, query_lens), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("specs", [SPECS, (make_latent(16, 576, 512),), (make_latent(128, 16, 8),)])
def test_a_prompt_gives_the_same_in_any_chunks(kernels, dtype, specs):
    """Of one token (decoding), few (split among threads), many, over and inside of tiles."""
    total = 560
    step = make_step(kernels, specs, [total], dtype=dtype)
    whole = step.run_all([total])
    step.storage.fill_(255)
    sizes = [1, 2, 5, 8, 31, 100, 109, 1, 1, 3, 16, 282, 1]
    assert sum(sizes) == total
    start = 0
    for size in sizes:
        results = step.run_all([size], [start + size])
        assert_equal(results, [out[start : start + size] for out in whole])
        start += size


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_of_a_prompt_is_as_if_decoded(best, dtype):
    total = 300
    step = make_step(best, SPECS, [total], dtype=dtype)
    whole = step.run_all([total])
    for position in range(total):
        results = step.run_all([1], [position + 1])
        assert_equal(results, [out[position : position + 1] for out in whole])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_company(kernels, dtype):
    contexts = [1, 64, 300, 17, 400, 600, 65, 290, 40]
    query_lens = [1] * 6 + [3, 270, 40]
    step = make_step(kernels, SPECS, contexts, dtype=dtype)
    fill_all_but(step, query_lens)
    crowd = step.run_all(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    for order in ([0], [5], [6], [7], [8, 7], [4, 2, 0, 7, 6]):
        tokens = [t for i in order for t in range(starts[i], starts[i + 1])]
        assert_equal(step.run_all(query_lens, order=order), [out[tokens] for out in crowd])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_block_sizes_change_nothing(library, dtype):
    contexts, query_lens = [3000, 700, 33, 1100, 400], [1, 1, 1, 2, 200]
    results = []
    for num_threads, block_size in ((1, 16), (2, 8), (3, 64), (7, 2048)):
        kernels = NativeKernels(library, num_threads=num_threads)
        step = make_step(kernels, SPECS, contexts, dtype=dtype, block_size=block_size)
        fill_all_but(step, query_lens)
        results += [step.run_all(query_lens) for _ in range(2)]
    for other in results[1:]:
        assert_equal(results[0], other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_gives_the_bits_of_a_copy(kernels, dtype):
    contexts = [600, 900, 515, 513, 700, 514, 800]
    results, num_runs = [], []
    for in_blocks in (True, False):
        step = make_step(kernels, SPECS, contexts, dtype=dtype)
        step.share([0, 1, 3, 4], 512, in_blocks)
        step.share([2, 5, 6], 256, in_blocks)
        step.fill([c - 1 for c in contexts])
        results.append(step.run_all([1] * len(contexts)))
        num_runs.append(step.backend.native.step.num_shared_runs)
    assert num_runs[0] > 0 and num_runs[1] == 0
    assert_equal(*results)


def test_run_takes_non_contiguous_inputs(best):
    step = make_step(best, make_latent(), [20, 30])
    step.fill([19, 20])
    q, k, *_ = step.inputs(0, [1, 10])
    (expected,) = step.run_all([1, 10])
    fused = torch.cat([q, k], dim=1)
    assert torch.equal(
        step.backend.run(0, AttentionInputs(*fused.split([5, 1], dim=1), None)), expected
    )
    by_heads = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(
        step.backend.run(0, AttentionInputs(by_heads, k, k * float("nan"))), expected
    )


def test_page_format():
    page_format = CpuPagedAttention.page_format(
        make_latent(16, 576, 512), 16, kv_of(torch.bfloat16)
    )
    assert page_format.bytes_per_layer == 16 * 576 * 2
    with pytest.raises(ConfigurationError, match="head_dim=41 is odd"):
        CpuPagedAttention.page_format(make_latent(16, 41, 32), 16, kv_of(torch.bfloat16))
