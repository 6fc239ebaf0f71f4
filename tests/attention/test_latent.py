"""Latent layers (multi-head latent attention): the reference, the torch backend, refusals.

Bounds are those of `test_torch_paged.py`: fp32 arithmetic on values that the KV dtype holds.
"""

import random

import pytest
import torch
from tests.attention.paged import PagedStep, kv_of, make_spec
from tests.attention.test_torch_paged import EDGES, OPTIONS

from quire.attention.flashinfer_paged import FlashInferAttention
from quire.attention.interface import AttentionSpec
from quire.attention.reference import attend_dense
from quire.attention.torch_paged import TorchPagedAttention
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs


def make_latent(num_heads=5, head_dim=40, value_dim=32, **options):
    return make_spec(num_heads, 1, head_dim, value_dim=value_dim, **options)


def make_step(specs, contexts, **options):
    return PagedStep(TorchPagedAttention(), specs, contexts, **options)


def test_the_reference_reads_keys_and_values_from_one_vector():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 5, 40, generator=generator)
    k = torch.randn(7, 1, 40, generator=generator)
    out, lse = attend_dense(make_latent(), q, k, None)
    plain, plain_lse = attend_dense(make_spec(5, 1, 40), q, k, k)
    assert out.shape == (3, 5, 32)
    assert torch.equal(out, plain[..., :32]) and torch.equal(lse, plain_lse)


@pytest.mark.parametrize("value_dim", [32, 16])
def test_absorbed_projections_give_what_plain_heads_give(value_dim):
    """DeepSeek-V2, section 2.1.2 and appendix C: keys and values of each head are projections of
    the latent, beside them a rotated part that all heads share; in float64."""
    generator = torch.Generator().manual_seed(2)
    num_heads, num_keys, nope, rope, out_dim = 4, 9, 24, 8, 20

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    latent, k_rope = draw(num_keys, value_dim), draw(num_keys, rope)
    q_nope, q_rope = draw(3, num_heads, nope), draw(3, num_heads, rope)
    w_uk, w_uv = draw(num_heads, nope, value_dim), draw(num_heads, out_dim, value_dim)
    scale = (nope + rope) ** -0.5

    k = torch.einsum("hnc,kc->khn", w_uk, latent)
    k = torch.cat([k, k_rope[:, None].expand(-1, num_heads, -1)], dim=-1)
    v = torch.einsum("hoc,kc->kho", w_uv, latent)
    scores = torch.einsum("qhd,khd->hqk", torch.cat([q_nope, q_rope], dim=-1), k) * scale
    scores += torch.full((3, num_keys), float("-inf"), dtype=torch.float64).triu_(num_keys - 2)
    expected = torch.einsum("hqk,kho->qho", scores.softmax(-1), v)

    spec = AttentionSpec(num_heads, 1, value_dim + rope, scale, value_dim=value_dim)
    q = torch.cat([torch.einsum("qhn,hnc->qhc", q_nope, w_uk), q_rope], dim=-1)
    stored = torch.cat([latent, k_rope], dim=-1)[:, None]
    out, _ = attend_dense(spec, q, stored, None)
    absorbed = torch.einsum("qhc,hoc->qho", out, w_uv)
    torch.testing.assert_close(absorbed, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_decodes_and_computes_chunks_in_one_step(name):
    contexts = [*EDGES, 1, 33, 300, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 290, 2, 17, 1]
    (out,) = make_step((make_latent(**OPTIONS[name]),), contexts).check(query_lens)
    assert out.shape[1:] == (5, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim"), [(1, 40, 32), (17, 24, 24), (3, 18, 1), (16, 576, 512)]
)
def test_torch_serves_shapes_and_dtypes(dtype, num_heads, head_dim, value_dim):
    specs = tuple(
        make_latent(num_heads, head_dim, value_dim, soft_cap=soft_cap) for soft_cap in (None, 20.0)
    )
    step = make_step(specs, [5, 64, 200, 31, 150], dtype=dtype, block_size=32)
    step.check([1, 1, 1, 31, 70])


def test_torch_serves_latent_layers_beside_others():
    """Pages of other sizes in one pool; a common prefix is read once for those that have it."""
    specs = (make_latent(), make_spec(4, 2, 40), make_latent(window=33))
    step = make_step(specs, [700, 700, 100, 130], groups=(0, 1, 1), padding_bytes=64)
    step.share([0, 1], 640)
    step.check([1, 1, 1, 60])


@pytest.mark.parametrize("seed", range(4))
def test_torch_gives_the_same_in_chunks(seed):
    rng = random.Random(seed)
    spec = make_latent(rng.randint(1, 17), window=rng.choice([None, 50]))
    total, size = 260, rng.randint(1, 100)
    whole, step = make_step((spec,), [total]), make_step((spec,), [total])
    (expected,) = whole.run_all([total])
    ends = [*range(size, total, size), total]
    starts = [0, *ends[:-1]]
    parts = [step.run_all([e - s], [e])[0] for s, e in zip(starts, ends, strict=True)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(step.storage, whole.storage)


def test_a_value_that_is_given_is_ignored():
    step = make_step((make_latent(),), [20, 30])
    step.fill([19, 20])
    q, k, *_ = step.inputs(0, [1, 10])
    (expected,) = step.run_all([1, 10])
    assert torch.equal(
        step.backend.run(0, AttentionInputs(q, k, torch.full_like(k, float("nan")))), expected
    )


def test_a_page_is_one_vector_a_token():
    page_format = TorchPagedAttention.page_format(
        make_latent(16, 576, 512), 16, kv_of(torch.bfloat16)
    )
    assert page_format.bytes_per_layer == 16 * 576 * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec(4, 2, 40, value_dim=32), "num_kv_heads=2 is not 1, but a latent layer"),
        (make_latent(value_dim=41), "value_dim=41 is not from 1 to head_dim=40"),
        (make_latent(value_dim=0), "value_dim=0 is not from 1 to head_dim=40"),
    ],
)
def test_invalid_latent_specs_are_refused(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        TorchPagedAttention.page_format(spec, 16, kv_of(torch.float32))


def test_flashinfer_refuses_latent_layers():
    spec = make_latent(16, 64, 64)
    with pytest.raises(ConfigurationError, match="'flashinfer' has no pages of latent layers"):
        FlashInferAttention.page_format(spec, 16, kv_of(torch.bfloat16))
