"""Falcon-H1 against transformers: its multipliers, groups and norms."""

import pytest
import transformers
from tests.models.family_shapes import FAMILIES, SMALL

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.hybrids.falcon_h1 import FalconH1Config

SHAPES = {
    "all multipliers": {},
    "one group, biases": {
        "mamba_n_groups": 1,
        "attention_bias": True,
        "attention_in_multiplier": 1.0,
        "mamba_proj_bias": True,
        "ssm_in_multiplier": 1.0,
        "projectors_bias": True,
        "mlp_bias": True,
        "mlp_multipliers": [1.0, 0.7],
    },
    "a norm before the gate": {"mamba_rms_norm": True, "mamba_conv_bias": False},
    "a norm behind the gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "tied, three taps": {"tie_word_embeddings": True, "mamba_d_conv": 3},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(changes, save_checkpoint, assert_same_logits):
    class_name, fields = FAMILIES["falcon_h1"]
    folder, reference = save_checkpoint(getattr(transformers, class_name), **(fields | changes))
    assert_same_logits(folder, reference)


RAW = SMALL | {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 64}


def test_silent_fields_have_transformers_values():
    config = FalconH1Config.from_hf(RAW)
    silent = transformers.FalconH1Config(
        **{name: RAW[name] for name in RAW if name != "architectures"}
    )
    scan = config.mamba.scan
    assert scan.head_dim * scan.num_heads == silent.mamba_d_ssm
    assert scan.state_size == silent.mamba_d_state
    assert scan.num_groups == silent.mamba_n_groups
    assert (scan.min_step, scan.max_step) == silent.time_step_limit
    assert config.mamba.conv_width == silent.mamba_d_conv
    assert config.mamba.conv_bias == silent.mamba_conv_bias
    assert (config.mamba.norm_eps is not None) == silent.mamba_rms_norm
    assert config.mamba.gates_first == (not silent.mamba_norm_before_gate)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"attention_bias": True, "attention_in_multiplier": 2.0}, UnsupportedModelError, "no pub"),
        ({"attention_chunk_size": 1}, UnsupportedModelError, "attention_chunk_size"),
        ({"mlp_multipliers": [1.0]}, CheckpointError, "a list of 2 numbers"),
        ({"mamba_d_head": 32}, CheckpointError, "must equal mamba_d_ssm, 1024"),
        ({"time_step_limit": [1.0]}, CheckpointError, "must be two numbers"),
    ],
)
def test_refuses(fields, error, message):
    with pytest.raises(error, match=message):
        FalconH1Config.from_hf(RAW | fields)


def test_ranks_share_heads_and_groups():
    config = FalconH1Config.from_hf(RAW)
    assert config.why_not_split(2) is None  # of one group each rank has all
    assert config.share_of(0, 2).mamba.scan.num_heads == 32
    normed = FalconH1Config.from_hf(RAW | {"mamba_rms_norm": True})
    assert "1 groups of Mamba-2" in str(normed.why_not_split(2))
