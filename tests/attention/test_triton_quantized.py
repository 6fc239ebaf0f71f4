"""Attention over int8 and e4m3 pages in the interpreter, against float64 over what they hold.

Tolerances: probabilities times the scales of V are rounded to bf16 before they multiply the codes,
whatever the model's dtype; queries of fp32 are rounded to bf16 as well, which moves a score of a
few units by up to 2^-9 of it; the output is rounded to the model's dtype.
"""

import random

import pytest
import torch
from tests.attention.paged import POISON, kv_of, make_spec

pytest.importorskip("triton")

from tests.attention.triton_step import CODE_FORMATS, QuantizedStep, torch_write

from quire.attention import triton_paged, triton_plan
from quire.attention.triton_paged import TritonPagedAttention
from quire.core.step import HOLE_BLOCK
from quire.kernels.triton.attention.paged_attention import paged_attention

OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "cap": {"soft_cap": 5.0},
    "all": {"window": 70, "soft_cap": 3.0, "has_sinks": True, "scale": 0.2},
    "encoder window": {"causal": False, "window": 30},
}
MIXED = [1, 17, 260, 33, 90]
MIXED_LENS = [1, 1, 1, 33, 7]
TOLERANCE = 3e-2


@pytest.fixture
def torch_writes(monkeypatch):
    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)


def make_step(specs, contexts, dtype, batch_invariant=False, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    options.setdefault("q_dtype", torch.bfloat16)
    backend = TritonPagedAttention(batch_invariant=batch_invariant)
    return QuantizedStep(backend, specs, contexts, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", CODE_FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(name, dtype, torch_writes):
    make_step(make_spec(2, 1, 16, **OPTIONS[name]), MIXED, dtype).check(MIXED_LENS, TOLERANCE)


@pytest.mark.parametrize("dtype", CODE_FORMATS)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_and_reads_by_the_kernels_of_both(dtype, q_dtype):
    """Heads and layers interleave in a page; windows differ; blocks are larger than a tile."""
    specs = (make_spec(6, 2, 40), make_spec(6, 2, 40, window=9, has_sinks=True))
    step = make_step(specs, [1, 70, 12], dtype, q_dtype=q_dtype, block_size=64, padding_bytes=64)
    step.check([1, 1, 5], TOLERANCE)


@pytest.mark.parametrize("dtype", CODE_FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(7, 1, 80), (6, 2, 96), (3, 3, 40), (32, 1, 64), (2, 1, 256), (80, 1, 16), (140, 2, 16)],
)
def test_head_counts_and_sizes(num_heads, num_kv_heads, head_dim, dtype, torch_writes):
    step = make_step(make_spec(num_heads, num_kv_heads, head_dim), [5, 40, 31], dtype)
    step.check([1, 1, 5], TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_with_holes(seed, torch_writes):
    """Table entries before all windows are holes or far outside."""
    rng = random.Random(seed)
    group_size, num_kv_heads = rng.choice([1, 2, 3, 7]), rng.choice([1, 2])
    window, size = rng.choice([None, rng.randint(1, 90)]), rng.choice([8, 16, 64])
    options = {"soft_cap": rng.choice([None, 10.0]), "has_sinks": rng.random() < 0.5}
    query_lens = [1] * rng.randint(0, 3) + [rng.randint(2, 30) for _ in range(rng.randint(1, 2))]
    contexts = [n + int(rng.lognormvariate(4, 1)) for n in query_lens]
    spec = make_spec(group_size * num_kv_heads, num_kv_heads, 16, window=window, **options)
    step = make_step(
        spec, contexts, CODE_FORMATS[seed % 2], seed % 3 == 0, block_size=size, seed=seed
    )
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    batch = step.batch(query_lens)
    for row, context, n in zip(batch.rows_list, contexts, query_lens, strict=True):
        passed = max(0, context - n - (window or context) + 1) // size
        batch.groups[0].block_tables[row, :passed] = rng.choice([HOLE_BLOCK, POISON, 2**30])
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    expected = step.expected(0, query_lens)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", CODE_FORMATS)
@pytest.mark.parametrize("block_size", [8, 128])
def test_a_uniform_prompt_is_the_same_in_any_chunks_to_the_bit(dtype, block_size, monkeypatch):
    """Chunks, then decoding, beside another sequence: the bits of the whole prompt alone, in blocks
    of 16."""
    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)
    monkeypatch.setattr(triton_plan, "MIN_UNIFORM_CHUNK_TOKENS", 64)
    spec, total = make_spec(3, 1, 16, window=50, has_sinks=True, soft_cap=9.0), 83
    whole = make_step(spec, [5, total], dtype, True).run_all([5, total], order=[1])[0]
    step = make_step(spec, [5, total], dtype, True, block_size=block_size)
    step.fill([4, 0])
    start = 0
    for size in [40, 9, 1, 25, 7, 1]:
        (out,) = step.run_all([1, size], [5, start + size])
        assert torch.equal(out[1:], whole[start : start + size])
        start += size
    assert start == total


def test_heads_in_several_tiles_are_the_same_in_any_chunks_to_the_bit(torch_writes):
    spec, total = make_spec(70, 1, 16), 12
    whole = make_step(spec, [total], torch.int8, True).run_all([total])[0]
    step = make_step(spec, [total], torch.int8, True)
    for start, size in ((0, 5), (5, 6), (11, 1)):
        (out,) = step.run_all([size], [start + size])
        assert torch.equal(out, whole[start : start + size])


def test_queries_of_fp32_are_rounded_before_they_meet_codes():
    step = make_step(make_spec(2, 1, 16), [3], torch.int8, q_dtype=torch.float32)
    step.fill([2])
    (out,) = step.run_all([1])
    assert out.dtype == torch.float32
    shape = step.backend._layers[0].decode
    pages, q = step.backend._layers[0].pages, torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=r"q is torch.float32, but over codes must be"):
        paged_attention(q, pages, None, None, None, q, None, shape)


@pytest.mark.parametrize("dtype", CODE_FORMATS)
def test_a_decode_row_is_the_same_alone_to_the_bit(dtype, torch_writes):
    step = make_step(make_spec(4, 2, 16), [300, 40, 7], dtype)
    step.fill([299, 39, 6])
    (together,) = step.run_all([1, 1, 1])
    for i in range(3):
        (alone,) = step.run_all([1, 1, 1], order=[i])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("dtype", CODE_FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_page_takes_little_more_than_half(head_dim, dtype):
    spec = make_spec(8, 2, head_dim)
    size = TritonPagedAttention.page_format(spec, 16, kv_of(dtype)).bytes_per_layer
    wide = TritonPagedAttention.page_format(spec, 16, kv_of(torch.bfloat16)).bytes_per_layer
    assert size / wide == (head_dim + 2) / (2 * head_dim)
