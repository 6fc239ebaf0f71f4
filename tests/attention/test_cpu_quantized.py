"""The native backend over int8 pages: what it stores, what it computes, and the law.

Stored bytes are those that `quantized_kv.py` defines. Results are compared with float64 attention
over what the codes stand for. What the kernels round beside that (quantized/quantized_rows.h):
queries by at most half of max |q| / 32639 an element, weights by half of the greatest / 32767. With
standard normals of up to 256 dimensions scores move by less than 2^-10, outputs by less than 2^-9;
bf16 outputs are rounded beside it, by 2^-9 of the value.
"""

import pytest
import torch
from tests.attention.paged import kv_of, make_spec
from tests.attention.test_cpu_invariance import assert_equal, part
from tests.attention.test_quantized_kv import QuantizedStep
from tests.attention.test_torch_paged import EDGES, OPTIONS
from tests.pairwise import pairwise

from quire.attention.cpu_paged import MAX_QUANTIZED_DIM, CpuPagedAttention
from quire.attention.kv_format import rotate_vectors
from quire.attention.quantized_kv import INT8
from quire.core.step import HOLE_BLOCK
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.options import NATIVE_KERNELS

Q_DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 2.0**-9, torch.bfloat16: 2.0**-7}
SPECS = (make_spec(6, 2, 40), make_spec(6, 2, 40, window=200, soft_cap=4.0, has_sinks=True))


def make_step(kernels, specs, contexts, q_dtype=torch.float32, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    backend = CpuPagedAttention(kernels)
    return QuantizedStep(backend, specs, contexts, dtype=torch.int8, q_dtype=q_dtype, **options)


def check(step, query_lens):
    return step.check(query_lens, BOUNDS[step.q_dtype])


def stored_vectors(step, layer=0, sequence=0):
    """(codes [2, T, Hkv, D], scales [2, T, Hkv]) of a sequence, by the documented layout."""
    spec, size = step.specs[layer], step.block_size
    unit, dim = min(size, 16), -(-spec.head_dim // 4) * 4
    pages = step.layers[layer].pages[torch.tensor(step.tables[0][sequence])]
    heads = pages.view(len(pages), spec.num_kv_heads, -1)
    halves = heads[..., : 2 * size * dim].unflatten(-1, (2, -1))
    keys = halves[:, :, 0].view(-1, spec.num_kv_heads, size // unit, dim // 4, unit, 4)
    keys = (keys ^ 0x80).permute(0, 2, 4, 1, 3, 5).flatten(-2).flatten(0, 2)
    values = halves[:, :, 1].view(-1, spec.num_kv_heads, size // unit, unit // 4, dim, 4)
    values = values.permute(0, 2, 3, 5, 1, 4).flatten(0, 3)
    codes = torch.stack((keys, values)).view(torch.int8)
    scales = heads[..., 2 * size * dim :].contiguous().view(torch.bfloat16).unflatten(-1, (2, -1))
    return codes, scales.permute(2, 0, 3, 1).flatten(1, 2)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("head_dim", [64, 24, 18])
def test_stored_codes_and_scales_equal_the_definition(kernels, q_dtype, block_size, head_dim):
    step = make_step(kernels, make_spec(4, 2, head_dim), [37], q_dtype, block_size=block_size)
    k, v = step.k[0][0], step.v[0][0]
    k[3], v[5] = 0.0, 0.0
    k[7, 0] *= 1e-41
    v[8, 1] *= 1e30
    k[9, 1, 4], v[10, 0, 2] = torch.inf, torch.nan
    step.fill([37])
    codes, scales = stored_vectors(step)
    for part_codes, part_scales, x in zip(codes, scales, (rotate_vectors(k), v), strict=True):
        expected, expected_scales = INT8.values.encode(x)
        assert torch.equal(part_codes[:37, :, :head_dim], expected)
        assert not part_codes[:37, :, head_dim:].any()
        assert torch.equal(part_scales[:37].isnan(), expected_scales.isnan())
        assert torch.equal(part_scales[:37].nan_to_num(), expected_scales.nan_to_num())


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(kernels, name, q_dtype):
    contexts = [*EDGES, 1, 33, 290, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 280, 2, 17, 1]
    check(make_step(kernels, make_spec(**OPTIONS[name]), contexts, q_dtype), query_lens)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 128, 2048])
def test_block_sizes(kernels, q_dtype, block_size):
    contexts = [1, 9, block_size + 1, 2 * min(block_size, 300) + 5, 40]
    specs = (make_spec(2, 1, 16), make_spec(2, 1, 16, window=50))
    step = make_step(kernels, specs, contexts, q_dtype, block_size=block_size, padding_bytes=64)
    check(step, [1, 1, 1, 1, 33])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(7, 1, 80), (14, 2, 96), (3, 3, 18), (12, 4, 64), (24, 1, 128), (2, 1, 256), (5, 5, 2)],
)
def test_head_counts_and_sizes(kernels, num_heads, num_kv_heads, head_dim):
    spec = make_spec(num_heads, num_kv_heads, head_dim)
    step = make_step(kernels, spec, [5, 64, 300, 31, 150], torch.bfloat16)
    check(step, [1, 1, 1, 31, 70])


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("specs", [SPECS, (make_spec(2, 1, 80),), (make_spec(32, 1, 18),)])
def test_a_prompt_gives_the_same_in_any_chunks(kernels, q_dtype, specs):
    sizes = [1, 2, 5, 8, 31, 100, 109, 1, 1, 3, 16, 282, 1]
    total = sum(sizes)
    step = make_step(kernels, specs, [total], q_dtype)
    whole = step.run_all([total])
    step.storage.fill_(255)
    start = 0
    for size in sizes:
        results = step.run_all([size], [start + size])
        assert_equal(results, part(whole, slice(start, start + size)))
        start += size


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_a_row_is_the_same_alone_and_in_any_company(kernels, q_dtype):
    contexts = [1, 64, 300, 17, 400, 600, 65, 290, 40]
    query_lens = [1] * 6 + [3, 270, 40]
    step = make_step(kernels, SPECS, contexts, q_dtype)
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    crowd = step.run_all(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    for order in ([0], [5], [6], [7], [8, 7], [4, 2, 0, 7, 6]):
        tokens = [t for i in order for t in range(starts[i], starts[i + 1])]
        assert_equal(step.run_all(query_lens, order=order), part(crowd, tokens))


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_threads_and_block_sizes_change_nothing(library, q_dtype):
    contexts, query_lens = [3000, 700, 33, 900, 400], [1, 1, 1, 2, 300]
    results = []
    for num_threads, block_size in ((1, 16), (2, 16), (7, 16), (2, 8), (2, 64), (2, 2048)):
        backend_kernels = NativeKernels(library, num_threads=num_threads)
        step = make_step(backend_kernels, SPECS, contexts, q_dtype, block_size=block_size)
        step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
        results += [step.run_all(query_lens) for _ in range(2)]
    for other in results[1:]:
        assert_equal(results[0], other)


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_a_shared_prefix_gives_the_bits_of_a_copy(kernels, q_dtype):
    contexts = [700 + i for i in range(9)]
    results = []
    for in_blocks in (True, False):
        step = make_step(kernels, (make_spec(14, 2, 24), *SPECS), contexts, q_dtype)
        step.share(range(9), 512, in_blocks)
        step.fill([c - 1 for c in contexts])
        results.append(step.run_all([1] * 9))
        assert (step.backend.native.step.num_shared_runs > 0) == in_blocks
    assert_equal(*results)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_blocks_that_a_window_has_passed_are_not_read(kernels, block_size):
    """Neither codes nor scales: their blocks are holes, and those of no sequence NaN."""
    contexts, query_lens = [600, 290, 70, 333], [1, 1, 3, 40]
    spec = make_spec(6, 2, 24, window=20)
    step = make_step(kernels, spec, contexts, block_size=block_size)
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    (expected,) = step.run_all(query_lens)
    batch = step.batch(query_lens)
    for row, context, n in zip(batch.rows_list, contexts, query_lens, strict=True):
        passed = max(0, context - n - 19) // block_size
        batch.groups[0].block_tables[row, :passed] = HOLE_BLOCK
    step.backend.plan(batch)
    assert torch.equal(step.backend.run(0, step.inputs(0, query_lens)), expected)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_and_infinity_affect_only_their_row(kernels, which, number, q_dtype):
    contexts, query_lens = [40, 300, 500, 270], [1, 1, 1, 20]
    step = make_step(kernels, make_spec(6, 2, 24), contexts, q_dtype)
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    (sound,) = step.run_all(query_lens)
    getattr(step, which)[0][1][299, 0, 5] = number
    getattr(step, which)[0][3][260, 1, 7] = number
    (out,) = step.run_all(query_lens)
    seen = [1, *range(3 + 260 - 250, 23)] if which != "q" else [1, 13]
    for token in range(23):
        if token in seen:
            assert out[token].isnan().any()
        else:
            assert torch.equal(out[token], sound[token])


def test_sums_of_the_largest_numbers_are_exact(kernels):
    """All products at their bounds: 512 dimensions, and values over a whole tile."""
    spec = make_spec(2, 1, MAX_QUANTIZED_DIM, scale=1e-6)
    step = make_step(kernels, spec, [512])
    for sequence in (*step.q[0], *step.k[0], *step.v[0]):
        sequence.fill_(1.0)
    step.v[0][0][256:] = -3.0
    (out,) = step.run_all([512])
    torch.testing.assert_close(out[255], torch.ones(2, MAX_QUANTIZED_DIM), atol=2e-4, rtol=0.0)
    expected = torch.full((2, MAX_QUANTIZED_DIM), -1.0)
    torch.testing.assert_close(out[511], expected, atol=4e-3, rtol=0.0)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (make_spec(2, 1, 514), "head_dim=514 is more than 512"),
        (make_spec(2, 1, 9), "head_dim=9 is odd"),
        (make_spec(2, 1, 64, value_dim=48), "no int8 pages for latent layers"),
    ],
)
def test_unsupported_page_formats_are_refused_by_name(spec, match):
    with pytest.raises(ConfigurationError, match=match):
        CpuPagedAttention.page_format(spec, 16, kv_of(torch.int8))


def test_a_token_takes_at_most_0_53_of_bf16():
    spec = make_spec(12, 4, 64)
    sizes = [
        CpuPagedAttention.page_format(spec, 16, kv_of(dtype)).bytes_per_layer
        for dtype in (torch.int8, torch.bfloat16)
    ]
    assert sizes[0] == 16 * 4 * 2 * (64 + 2) and sizes[0] <= 0.53 * sizes[1]
