"""The Triton backend in the interpreter against the oracle, over random paged pools.

Tolerances: fp32 as `test_torch_paged.py`; an exponential is a power of two here, whose argument is
rounded once more, hence 5e-6. bf16 and fp16: probabilities are rounded to the dtype before they
multiply V, as all flash attention does: half an ulp of it, on values of a few units. Every byte of
the pool that no sequence wrote is NaN and every table entry that may not be read lies far outside.
"""

import random

import pytest
import torch
from tests.attention.paged import POISON, kv_of, make_spec
from tests.attention.triton_step import TritonStep, torch_write

from quire.attention.interface import AttentionBatch, GroupBatch
from quire.core.step import HOLE_BLOCK
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.rotary import Angles, Rotation, rotate

pytest.importorskip("triton")

from quire.attention import triton_paged, triton_plan
from quire.attention.triton_paged import TritonPagedAttention
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "window of one": {"window": 1},
    "cap": {"soft_cap": 5.0},
    "sinks": {"has_sinks": True},
    "encoder": {"causal": False},
    "encoder window": {"causal": False, "window": 30},
    "all": {"window": 70, "soft_cap": 3.0, "has_sinks": True, "scale": 0.2},
}
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MIXED = [1, 17, 260, 33, 90]
MIXED_LENS = [1, 1, 1, 33, 7]


@pytest.fixture(autouse=True)
def torch_writes(monkeypatch):
    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)


def make_step(specs, contexts, batch_invariant=False, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    backend = TritonPagedAttention(batch_invariant=batch_invariant)
    return TritonStep(backend, specs, contexts, **options)


def check(step, query_lens):
    return step.check(query_lens, TOLERANCES[step.dtype])


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(name):
    check(make_step(make_spec(2, 1, 16, **OPTIONS[name]), MIXED), MIXED_LENS)


@pytest.mark.parametrize("name", ["all", "encoder window"])
def test_uniform_rows(name):
    check(make_step(make_spec(2, 1, 16, **OPTIONS[name]), MIXED, True), MIXED_LENS)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_steps_of_decoding_alone(name):
    """Contexts of one, two and more chunks."""
    options = OPTIONS[name] | ({"window": 300} if "window" in OPTIONS[name] else {})
    check(make_step(make_spec(2, 1, 16, **options), [1, 256, 257, 600]), [1] * 4)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [8, 64, 2048])
def test_block_sizes_and_dtypes(dtype, block_size):
    """Tiles of many blocks, of one, and many tiles in a block."""
    specs = (make_spec(2, 1, 16), make_spec(2, 1, 16, window=50))
    contexts = [2, min(block_size, 128) + 5, 70, 40]
    step = make_step(specs, contexts, block_size=block_size, dtype=dtype, q_dtype=dtype)
    check(step, [1, 1, 1, 30])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(7, 1, 80), (6, 2, 96), (3, 3, 40), (32, 1, 64), (2, 1, 256), (80, 1, 16)],
)
def test_head_counts_and_sizes(num_heads, num_kv_heads, head_dim):
    spec = make_spec(num_heads, num_kv_heads, head_dim)
    step = make_step(spec, [5, 40, 31], dtype=torch.bfloat16, q_dtype=torch.bfloat16)
    check(step, [1, 1, 5])


def test_groups_interleave_in_one_pool():
    """Two groups with their own tables; layers of one step differ in all that a layer may."""
    specs = (
        make_spec(4, 2, 40),
        make_spec(4, 2, 40, window=33),
        make_spec(4, 1, 80, soft_cap=4.0),
        make_spec(4, 2, 40, window=33, has_sinks=True),
    )
    step = make_step(specs, [1, 70, 20], groups=(0, 1, 0, 1), padding_bytes=64)
    check(step, [1, 1, 5])


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed):
    rng = random.Random(seed)
    group_size, num_kv_heads = rng.choice([1, 2, 3, 7]), rng.choice([1, 2])
    options = {
        "window": rng.choice([None, rng.randint(1, 300)]),
        "soft_cap": rng.choice([None, 10.0]),
        "has_sinks": rng.random() < 0.3,
        "causal": rng.random() < 0.8,
    }
    num_decodes, num_chunks = rng.randint(0, 3), rng.randint(0, 2)
    contexts = [int(rng.lognormvariate(4, 1)) + 1 for _ in range(num_decodes + num_chunks)]
    query_lens = [1] * num_decodes + [rng.randint(1, min(c, 30)) for c in contexts[num_decodes:]]
    step = make_step(
        make_spec(group_size * num_kv_heads, num_kv_heads, 16, **options),
        contexts or [3],
        rng.random() < 0.5,
        block_size=rng.choice([8, 16, 64]),
        seed=seed,
    )
    check(step, query_lens or [3])


def assert_same(results, others, first, count):
    """Of all layers: `results` are those of `count` tokens of `others`, to the bit."""
    for out, other in zip(results, others, strict=True):
        assert torch.equal(out, other[first : first + count])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_decode_row_is_the_same_alone_to_the_bit(batch_invariant):
    contexts = [17, 600]
    step = make_step(make_spec(2, 1, 16, has_sinks=True), contexts, batch_invariant)
    step.fill([c - 1 for c in contexts])
    crowd = step.run_all([1] * 2)
    for i in range(2):
        assert_same(step.run_all([1] * 2, order=[i]), crowd, i, 1)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_decode_row_is_the_same_beside_a_prompt_to_the_bit(batch_invariant):
    contexts = [17, 600, 40]
    specs = (make_spec(2, 1, 16, has_sinks=True), make_spec(2, 1, 16, window=90))
    step = make_step(specs, contexts, batch_invariant, groups=(0, 1))
    step.fill([16, 599, 20])
    crowd = step.run_all([1, 1, 20])
    assert_same(step.run_all([1, 1, 20], order=[0, 1]), crowd, 0, 2)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"window": 40, "has_sinks": True}), (torch.bfloat16, {"soft_cap": 4.0})],
)
def test_a_uniform_prompt_is_the_same_in_any_chunks_to_the_bit(dtype, options, monkeypatch):
    """Decoded, in tiles cut anywhere, beside others, over chunk boundaries, merged or not."""
    monkeypatch.setattr(triton_plan, "MIN_UNIFORM_CHUNK_TOKENS", 64)
    total = 83
    step = make_step(make_spec(3, 1, 16, **options), [5, total], True, dtype=dtype, q_dtype=dtype)
    whole = step.run_all([5, total], order=[1])
    step.storage.fill_(255)
    step.fill([4, 0])
    start = 0
    for size in [40, 9, 1, 25, 8]:
        results = step.run_all([1, size], [5, start + size])
        own = [out[1:] for out in results]
        assert_same(own, whole, start, size)
        start += size
    assert start == total
    assert_same(step.run_all([1, 1], [5, total], order=[1]), whole, total - 1, 1)


def padded(batch, count):
    """A decoding step with `count` sequences of padding at its end, as a captured one has them."""
    zeros = torch.zeros(count, dtype=torch.int32)
    (group,) = batch.groups
    num_sequences = len(batch.rows_list) + count
    return AttentionBatch(
        query_start=torch.arange(num_sequences + 1, dtype=torch.int32),
        context_lens=torch.cat([batch.context_lens, zeros]),
        rows=torch.cat([batch.rows, zeros.long()]),
        query_lens_list=batch.query_lens_list,
        context_lens_list=batch.context_lens_list,
        rows_list=batch.rows_list,
        num_decodes=batch.num_decodes,
        groups=(GroupBatch(group.block_tables, torch.cat([group.slot_mapping, zeros.long() - 1])),),
    )


@pytest.mark.parametrize("has_sinks", [False, True])
def test_padding_writes_nothing_and_yields_zero(has_sinks):
    step = make_step(make_spec(2, 1, 16, has_sinks=has_sinks), [40, 300])
    step.fill([39, 299])
    (expected,) = step.run_all([1, 1])
    stored = step.storage.clone()
    q, k, v, sinks, _ = step.inputs(0, [1, 1])
    junk = torch.full((3, 2, 16), 7.0)
    step.backend.plan(padded(step.batch([1, 1]), 3))
    inputs = (torch.cat([q, junk]), torch.cat([k, junk[:, :1]]), torch.cat([v, junk[:, :1]]))
    out = step.backend.run(0, AttentionInputs(*inputs, sinks))
    assert torch.equal(out[:2], expected)
    assert not out[2:].any()
    assert torch.equal(step.storage, stored)


def test_a_decode_step_follows_its_tensors_and_not_its_lists():
    """As it is replayed: lengths and rows change in place after the lists were last read."""
    step = make_step(make_spec(2, 1, 16), [300, 40])
    step.fill([299, 39])
    batch = step.batch([1, 1])
    now = step.batch([1, 1], [259, 17])
    expected = step.expected(0, [1, 1], [259, 17])
    for name in ("query_start", "context_lens", "rows"):
        getattr(batch, name).copy_(getattr(now, name))
    batch.groups[0].slot_mapping.copy_(now.groups[0].slot_mapping)
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, [1, 1], [259, 17]))
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)


def test_the_table_is_not_read_beyond_a_row_or_below_its_window():
    """Ids far outside the pool stand there, in the other rows and in holes."""
    step = make_step(make_spec(2, 1, 16, window=20), [200, 100, 90])
    query_lens = [1, 1, 5]
    step.fill([c - n for c, n in zip(step.contexts, query_lens, strict=True)])
    batch = step.batch(query_lens)
    tables = batch.groups[0].block_tables
    for row, context, n in zip(batch.rows_list, step.contexts, query_lens, strict=True):
        assert (tables[row, -(-context // 16) :] == POISON).all()
        tables[row, : max(0, context - n - 19) // 16] = HOLE_BLOCK
    step.backend.plan(batch)
    out = step.backend.run(0, step.inputs(0, query_lens))
    expected = step.expected(0, query_lens)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)


def test_parts_of_one_fused_projection_are_rotated_and_written(monkeypatch):
    """By the kernel that norms, rotates and writes, as models call it."""
    monkeypatch.setattr(triton_paged, "rotate_and_write", rotate_and_write)
    step = make_step(make_spec(2, 1, 16), [20, 30])
    q, k, v, *_ = step.inputs(0, [1, 3])
    table = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    angles = Angles(table, torch.tensor([19, 27, 28, 29]), torch.float32)
    rotation = Rotation(angles, torch.full((16,), 0.5), torch.full((16,), 2.0), 1e-6)
    turned_q, turned_k = rotate(q.clone(), k.clone(), rotation)
    step.fill([19, 27])
    step.backend.plan(step.batch([1, 3]))
    expected = step.backend.run(0, AttentionInputs(turned_q, turned_k, v))
    stored = step.storage.clone()
    step.storage.fill_(255)
    step.fill([19, 27])
    fused = torch.cat([q, k, v], dim=1).split([2, 1, 1], dim=1)
    torch.testing.assert_close(
        step.backend.run(0, AttentionInputs(*fused, rotation=rotation)),
        expected,
        atol=1e-6,
        rtol=1e-6,
    )
    pages = (s.view(torch.float32).nan_to_num() for s in (step.storage, stored))
    torch.testing.assert_close(*pages, atol=1e-6, rtol=1e-6)


def test_short_chunks_beyond_the_room_for_parts_are_attended_whole(monkeypatch):
    spec = make_spec(2, 1, 16)
    step = make_step(spec, [300, 600, 40])
    query_lens = [1, 3, 20]
    expected = check(step, query_lens)
    monkeypatch.setattr(triton_plan, "MAX_PART_BYTES", 2 * 18 * 4 * 4)
    for out, other in zip(check(step, query_lens), expected, strict=True):
        torch.testing.assert_close(out, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("head_dim", [4, 44, 264, 512])
def test_head_sizes_that_the_kernels_lack_are_refused(head_dim):
    with pytest.raises(ConfigurationError, match=f"head_dim={head_dim} can't be served"):
        TritonPagedAttention.page_format(make_spec(2, 1, head_dim), 16, kv_of(torch.float32))


def test_unsupported_block_sizes_and_dtypes_are_refused():
    with pytest.raises(ConfigurationError, match="block_size=12 is not a power of two"):
        TritonPagedAttention.page_format(make_spec(), 12, kv_of(torch.float32))
    with pytest.raises(ConfigurationError, match=r"KV format int16 can't be served"):
        TritonPagedAttention.page_format(make_spec(), 16, kv_of(torch.int16))
