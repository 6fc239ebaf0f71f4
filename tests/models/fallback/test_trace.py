"""What a run without numbers finds out of a model's attention."""

import pytest
from tests.models.fallback.conftest import raw_config

from quire.errors import UnsupportedModelError
from quire.models.fallback.hf_classes import find_class
from quire.models.fallback.trace import trace


def traced(model_type, **fields):
    return trace(*find_class(raw_config(model_type, **fields)))


def test_windows_caps_and_scales_are_those_of_each_layer():
    first, second = traced("gemma2", query_pre_attn_scalar=9, attn_logit_softcapping=30.0).specs
    assert (first.window, second.window) == (8, None)
    assert first.scale == second.scale == pytest.approx(1 / 3)
    assert first.soft_cap == second.soft_cap == 30.0


def test_sinks_are_seen():
    assert all(spec.has_sinks for spec in traced("gpt_oss").specs)


def test_heads_of_two_sizes_get_the_wider_one():
    spec = traced("deepseek_v3", v_head_dim=11, qk_nope_head_dim=9, qk_rope_head_dim=4).specs[0]
    assert spec.head_dim == 14  # 13, made even
    assert spec.scale == pytest.approx(13**-0.5)


def test_both_ends_are_named():
    found = traced("gpt2")
    assert (found.embedding, found.head) == ("transformer.wte.weight", "lm_head.weight")
    assert found.is_tied
    assert (found.vocab_size, found.hidden_size) == (320, 64)
    assert not traced("gpt2", tie_word_embeddings=False).is_tied


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("doge", {}, "attention call 0 has a mask of its own"),
        ("jetmoe", {}, "running it on the meta device failed"),
        ("bert", {"is_decoder": False}, "neither causal nor of a sliding window"),
    ],
)
def test_unsupported_attention_arguments_are_refused_by_name(model_type, fields, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        traced(model_type, **fields)
