"""What quantized formats keep, and whole-sequence attention against the float64 reference."""

import pytest
import torch

from quire.attention.int4_kv import INT4
from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat, rotate_vectors
from quire.attention.kv_rounding import KeyProbe, RoundedAttention, divergence
from quire.attention.quantized_kv import FP8, INT8
from quire.attention.reference import attend_dense
from quire.attention.whole_sequence import PIECE_QUERIES
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

SPECS = [
    AttentionSpec(4, 2, 32, 0.2),
    AttentionSpec(4, 2, 32, 0.2, window=9),
    AttentionSpec(6, 2, 32, 0.2, soft_cap=2.0, has_sinks=True),
    AttentionSpec(2, 2, 32, 0.2, causal=False),
]


def _qkv(spec: AttentionSpec, num_tokens: int):
    generator = torch.Generator().manual_seed(7)
    shapes = [(num_tokens, heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in (*shapes, shapes[1]))
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None
    return q, k, v, sinks


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_tokens", [1, 19, PIECE_QUERIES + 5])
def test_it_is_dense_attention_over_what_the_format_gives_back(spec, num_tokens):
    q, k, v, sinks = _qkv(spec, num_tokens)
    rounded = INT8.values.rounded
    kept = rotate_vectors(rounded(rotate_vectors(k)))
    expected, _ = attend_dense(spec, q, kept, rounded(v), sinks)
    found = RoundedAttention((spec,), INT8)(0, AttentionInputs(q, k, v, sinks))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_the_probe_changes_nothing_and_finds_no_error_where_none_is(spec):
    q, k, v, sinks = _qkv(spec, PIECE_QUERIES + 5)
    probe = KeyProbe((spec,), KVFormat.plain(torch.float32))
    expected, _ = attend_dense(spec, q, k, v, sinks)
    found = probe(0, AttentionInputs(q, k, v, sinks))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert probe.divergence == {0: 0.0}


def test_the_probe_finds_the_mean_divergence_of_the_weights():
    spec = AttentionSpec(4, 2, 32, 0.2)
    q, k, v, _ = _qkv(spec, 12)
    probe = KeyProbe((spec,), INT4)
    probe(0, AttentionInputs(q, k, v))
    total = 0.0
    for token in range(12):
        for head in range(4):
            weights = [
                torch.softmax(
                    keys[: token + 1, head // 2].double() @ q[token, head].double() * 0.2, 0
                )
                for keys in (k, INT4.keys.rounded(k))
            ]
            total += (weights[0] * (weights[0] / weights[1]).log()).sum().item()
    assert probe.divergence[0] == pytest.approx(total / 48, rel=1e-3)


@pytest.mark.parametrize(("form", "bound"), [(INT8, 0.5 / 127), (FP8, 1 / 16), (INT4, 8 / 15)])
@pytest.mark.parametrize("factor", [1e-6, 1.0, 300.0])
def test_each_vector_is_rounded_by_itself_and_within_its_bound(form, bound, factor):
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * factor
    rounding = form.values.rounded
    rounded = rounding(x)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((rounded - x).abs() <= 1.02 * bound * largest + 0.004 * largest).all()
    assert torch.equal(rounding(x[7:8, 1:2]), rounded[7:8, 1:2])
    assert not rounding(torch.zeros(1, 1, 64)).any()


def test_int4_spreads_an_outlier_before_it_rounds():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    x[:, 5] = 60.0
    error = (INT4.keys.rounded(x) - x).abs()
    assert error.max() < 0.5 * 2 * 60 / 15 / 2  # in place, elements beside it would be off by this
    with pytest.raises(ConfigurationError, match="this model's head size is 80"):
        INT4.keys.num_bytes(80)


def test_bytes_of_a_vector():
    forms = (KVFormat.plain(torch.float16), INT8, FP8, INT4)
    assert [form.keys.num_bytes(64) for form in forms] == [128, 66, 66, 40]


@pytest.mark.parametrize("form", [KVFormat.plain(torch.bfloat16), INT8, FP8, INT4])
@pytest.mark.parametrize("size", [32, 96])
def test_the_arrays_are_those_that_the_format_says(form, size):
    x = torch.randn(5, 3, size, generator=torch.Generator().manual_seed(3))
    arrays = form.keys.encode(x)
    assert [(a.dtype, tuple(a.shape[2:])) for a in arrays] == [*form.keys.arrays(size)]
    assert arrays[0].dtype == form.keys.dtype and form.keys.decode(*arrays).shape == x.shape


def test_a_divergence_counts_what_is_possible_only():
    exact = torch.tensor([0.5, 0.5, 0.0]).log()
    assert divergence(exact, torch.tensor([0.25, 0.75, 0.0]).log()).item() == pytest.approx(
        0.5 * torch.tensor([2.0, 2 / 3]).log().sum().item()
    )
