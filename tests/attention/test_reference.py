"""The oracle against torch's own attention and against sums done by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.attention.paged import make_spec

from quire.attention.reference import attend_dense, attend_sequences, visible_keys


def random_qkv(spec, num_queries, num_keys):
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    q = torch.randn(num_queries, spec.num_heads, spec.head_dim, generator=generator).double()
    kv = torch.randn(2, num_keys, spec.num_kv_heads, spec.head_dim, generator=generator).double()
    return q, kv[0], kv[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_equals_torch_where_torch_has_it(causal, num_heads, num_kv_heads):
    spec = make_spec(num_heads, num_kv_heads, 16, causal=causal)
    q, k, v = random_qkv(spec, 9, 9)
    out, _ = attend_dense(spec, q, k, v)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_queries_stand_at_the_end():
    spec = make_spec()
    q, k, v = random_qkv(spec, 9, 9)
    whole, whole_lse = attend_dense(spec, q, k, v)
    last, last_lse = attend_dense(spec, q[6:], k, v)
    torch.testing.assert_close(last, whole[6:])
    torch.testing.assert_close(last_lse, whole_lse[6:])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, ["11100", "11110", "11111"]),
        ({"window": 2}, ["01100", "00110", "00011"]),
        ({"causal": False}, ["11111", "11111", "11111"]),
        ({"causal": False, "window": 2}, ["01110", "00111", "00011"]),
    ],
)
def test_visible_keys(options, rows):
    visible = visible_keys(make_spec(**options), 3, 5)
    assert ["".join("01"[x] for x in row) for row in visible.tolist()] == rows


def test_scale_soft_cap_and_sinks_by_hand():
    spec = make_spec(1, 1, 1, scale=2.0, soft_cap=3.0, has_sinks=True)
    q, k, v = torch.tensor([[[1.0]]]), torch.tensor([[[0.5]], [[1.5]]]), torch.tensor([[[1.0]]] * 2)
    scores = [3 * math.tanh(2 * 0.5 / 3), 3 * math.tanh(2 * 1.5 / 3)]
    mass = sum(math.exp(s) for s in scores)
    out, lse = attend_dense(spec, q, k, v, torch.tensor([0.25]))
    assert lse.item() == pytest.approx(math.log(mass + math.exp(0.25)))
    assert out.item() == pytest.approx(mass / (mass + math.exp(0.25)))


def test_sequences_are_independent_and_in_order():
    spec = make_spec()
    first, second = random_qkv(spec, 2, 5), random_qkv(spec, 3, 3)
    out, lse = attend_sequences(spec, *zip(first, second, strict=True))
    assert torch.equal(out[:2], attend_dense(spec, *first)[0])
    assert torch.equal(lse[2:], attend_dense(spec, *second)[1])
