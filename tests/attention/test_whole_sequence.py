"""Exact attention over a whole sequence against the float64 reference."""

import pytest
import torch

from quire.attention.interface import AttentionSpec
from quire.attention.reference import attend_dense
from quire.attention.whole_sequence import PIECE_QUERIES, ExactAttention
from quire.kernels.attention_inputs import AttentionInputs

PLAIN = AttentionSpec(4, 2, 32, 0.2)
LATENT = AttentionSpec(4, 1, 48, 0.2, value_dim=32)


def _qkv(spec: AttentionSpec, num_tokens: int):
    generator = torch.Generator().manual_seed(7)
    sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(num_tokens, size, spec.head_dim, generator=generator) for size in sizes]


@pytest.mark.parametrize("num_tokens", [1, PIECE_QUERIES + 5])
def test_it_is_dense_attention(num_tokens):
    q, k, v = _qkv(PLAIN, num_tokens)
    expected, _ = attend_dense(PLAIN, q, k, v)
    found = ExactAttention((PLAIN,))(0, AttentionInputs(q, k, v))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_values_of_latent_layers_are_the_first_elements_of_keys():
    q, k, _ = _qkv(LATENT, 19)
    expected, _ = attend_dense(LATENT, q, k, None)
    found = ExactAttention((LATENT,))(0, AttentionInputs(q, k, None))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_called_without_keys_attends_the_written_ones():
    q, k, v = _qkv(PLAIN, 19)
    attention = ExactAttention((PLAIN,))
    attention(0, AttentionInputs(q, k, v))
    expected, _ = attend_dense(PLAIN, -q, k, v)
    found = attention(0, AttentionInputs(-q, None, None))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
