"""Nemotron-H against transformers: its kinds of layers."""

import pytest
import transformers
from tests.models.family_shapes import FAMILIES, SMALL

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.hybrids.nemotron_h import NemotronHConfig

SHAPES = {
    "a pattern": {},
    "biases": {"use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    "no MLP": {
        "num_hidden_layers": 3,
        "layers_block_type": ["full_attention", "linear_attention", "full_attention"],
        "n_groups": 3,
    },
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(changes, save_checkpoint, assert_same_logits):
    class_name, fields = FAMILIES["nemotron_h"]
    folder, reference = save_checkpoint(getattr(transformers, class_name), **(fields | changes))
    assert_same_logits(folder, reference)


RAW = SMALL | {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*-"}


def test_silent_fields_have_transformers_values():
    config = NemotronHConfig.from_hf({name: RAW[name] for name in RAW if name != "head_dim"})
    silent = transformers.NemotronHConfig(
        **{name: RAW[name] for name in RAW if name not in ("architectures", "num_hidden_layers")}
    )
    assert list(config.layer_types) == silent.layers_block_type
    assert config.attention_layers == [3]
    assert config.head_dim == silent.head_dim
    assert config.rms_norm_eps == silent.layer_norm_epsilon
    scan = config.mamba.scan
    assert (scan.num_heads, scan.head_dim) == (silent.mamba_num_heads, silent.mamba_head_dim)
    assert (scan.num_groups, scan.state_size) == (silent.n_groups, silent.ssm_state_size)
    assert config.mamba.conv_width == silent.conv_kernel


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"hybrid_override_pattern": "M-E*"}, UnsupportedModelError, "has 'moe'"),
        ({"hybrid_override_pattern": "MX"}, CheckpointError, "must have one of M, "),
        ({"layers_block_type": "M"}, CheckpointError, "layers_block_type"),
        ({"residual_in_fp32": True}, UnsupportedModelError, "residual_in_fp32 is true"),
        ({"time_step_limit": [0.1, 0.5]}, UnsupportedModelError, "time_step_limit is"),
        ({"mamba_dt_limit": [0.1, 0.5]}, UnsupportedModelError, "mamba_dt_limit is"),
        ({"time_step_min": 0.3}, UnsupportedModelError, "time_step_min is 0.3"),
        ({"n_groups": 3}, CheckpointError, "a multiple of n_groups, 3"),
        ({"attention_chunk_size": 1}, UnsupportedModelError, "attention_chunk_size"),
    ],
)
def test_refuses(fields, error, message):
    with pytest.raises(error, match=message):
        NemotronHConfig.from_hf(RAW | fields)
