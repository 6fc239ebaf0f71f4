"""Latent layers by the Triton backend, in the interpreter: against the oracle, and to the bit.

Tolerances are those of `test_triton_paged.py`.
"""

import pytest
import torch
from tests.attention.paged import kv_of, make_spec
from tests.attention.test_latent import make_latent

from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

pytest.importorskip("triton")

from tests.attention.triton_step import TritonStep

from quire.attention import triton_plan
from quire.attention.triton_paged import TritonPagedAttention
from quire.attention.triton_plan import DeviceLimits, chunk_rule, latent_shape, num_resident
from quire.kernels.rotary import Angles, Rotation
from quire.kernels.triton.attention.latent_write import latent_write

OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "all": {"window": 70, "soft_cap": 3.0, "has_sinks": True, "scale": 0.2},
    "encoder": {"causal": False},
    "encoder window": {"causal": False, "window": 30},
}
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MIXED, MIXED_LENS = [1, 17, 260, 33, 90], [1, 1, 1, 33, 7]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that contexts of a hundred tokens lie in several."""
    monkeypatch.setattr(triton_plan, "MIN_LATENT_CHUNK_TOKENS", 64)


def make_step(specs, contexts, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    return TritonStep(TritonPagedAttention(), specs, contexts, **options)


def check(step, query_lens):
    return step.check(query_lens, TOLERANCES[step.dtype])


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_and_chunks_in_one_step(name):
    (out,) = check(make_step(make_latent(3, **OPTIONS[name]), MIXED), MIXED_LENS)
    assert out.shape[1:] == (3, 32)


def test_steps_of_decoding_alone():
    specs = (make_latent(3), make_latent(3, window=100), make_latent(3))
    check(make_step(specs, [1, 64, 65, 200]), [1] * 4)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("block_size", "num_heads"), [(8, 1), (64, 17), (2048, 70)])
def test_block_sizes_dtypes_and_heads(dtype, block_size, num_heads):
    """70 heads are more than the rows of a tile; in fp32 17 are."""
    step = make_step(
        make_latent(num_heads, 40, 24), [2, 70, 40], block_size=block_size, dtype=dtype,
        q_dtype=dtype,
    )  # fmt: skip
    check(step, [1, 1, 9])


def test_latent_layers_beside_others_in_one_pool():
    specs = (make_latent(), make_spec(4, 2, 40), make_latent(window=33))
    step = make_step(specs, [70, 40, 100], groups=(0, 1, 1), padding_bytes=64)
    check(step, [1, 1, 20])


@pytest.mark.parametrize(
    ("num_heads", "window", "block_size", "count"),
    [(3, None, 8, 12), (5, 50, 16, 12), (20, 50, 64, 3)],
)
def test_a_token_has_the_same_bits_in_chunks_decoded_and_in_company(
    num_heads, window, block_size, count
):
    spec, total = make_latent(num_heads, window=window), 100

    def run(sizes):
        """The last tokens in chunks of these sizes, the last chunk beside another sequence."""
        step = make_step((spec,), [total, 70], block_size=block_size)
        step.fill([total - count, 60])
        outs, end = [], total - count
        for number, size in enumerate(sizes):
            end += size
            others = ([10], [70]) if number == len(sizes) - 1 else ([], [])
            (out,) = step.run_all([size, *others[0]], [end, *others[1]])
            outs.append(out[:size])
        return torch.cat(outs), step.storage

    whole, stored = run([count])
    for sizes in ([1] * count, [count - 1, 1]):
        out, storage = run(sizes)
        assert torch.equal(out, whole)
        assert torch.equal(storage, stored)


def test_vectors_are_written_to_their_slots_alone():
    pages = torch.full((4, 8, 24), torch.nan)
    k = torch.randn(4, 1, 24)
    slots = torch.tensor([9, -1, 31, 0])
    latent_write(k, pages, slots)
    flat = pages.view(-1, 24)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot], k[token, 0])
    assert flat[:, 0].isfinite().sum() == 3
    with pytest.raises(ValueError, match=r"must be \[T, 1, D\]"):
        latent_write(k.expand(4, 2, 24), pages, slots)
    with pytest.raises(ValueError, match="slot_mapping"):
        latent_write(k, pages, slots.int())


def test_a_model_turns_its_own_latents():
    step = make_step(make_latent(3), [20])
    step.backend.plan(step.batch([1], [20]))
    q, k, v, *_ = step.inputs(0, [1], [20])
    turned = Rotation(Angles(torch.zeros(30, 8), torch.zeros(1, dtype=torch.int64), q.dtype))
    with pytest.raises(AssertionError, match="turn q and k themselves"):
        step.backend.run(0, AttentionInputs(q, k, v, None, turned))


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (make_latent(4, 584, 520), torch.bfloat16, "value_dim <= 512"),
        (make_latent(4, 104, 32), torch.bfloat16, "at most 64 elements behind the value"),
        (make_latent(4, 36, 32), torch.bfloat16, "a multiple of 8"),
        (make_latent(4), torch.int8, "no pages of int8 for latent layers; choose kv_cache_dtype"),
        (make_latent(4), torch.float8_e4m3fn, "no pages of fp8 for latent layers"),
    ],
)
def test_latent_specs_beyond_the_kernels_are_refused(spec, dtype, message):
    with pytest.raises(ConfigurationError, match=message):
        TritonPagedAttention.page_format(spec, 16, kv_of(dtype))


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_latent_shape_is_uniform_and_parts_fit_the_workspace(is_wide, num_heads):
    limits = DeviceLimits(132, 228 << 10, 227 << 10, is_wide=is_wide)
    spec = make_latent(num_heads, 576, 512)
    shape = latent_shape(spec, 16, torch.bfloat16, limits)
    assert shape.uniform and num_resident(shape, torch.bfloat16, limits) == 132
    assert shape.num_head_tiles * shape.rows >= num_heads
    rule = chunk_rule(shape, 131_072)
    assert rule.chunk_tokens % shape.tile == 0
    assert (rule.parts_per_token - 1) * rule.chunk_tokens >= 131_072
    assert rule.parts_per_token * num_heads <= 8 * 128 + 1024
