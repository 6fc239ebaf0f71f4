"""StableLM against transformers: LayerNorm, a quarter that rotates, and parallel blocks."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES
from transformers import StableLmConfig as HFStableLmConfig

from quire.errors import UnsupportedModelError
from quire.models.families.stablelm import ParallelLayer, StableLmConfig

RAW = {
    "architectures": ["StableLmForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OF_ALL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
SHAPES = {
    "all": FAMILIES["stablelm"][1],
    "tied, without biases": {"tie_word_embeddings": True, "use_qkv_bias": False},
    "all of a head rotates": {"rope_parameters": OF_ALL},
    "parallel": {"use_parallel_residual": True, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFStableLmConfig, **shape)
    model = assert_same_logits(folder, reference)
    is_parallel = shape.get("use_parallel_residual", False)
    assert isinstance(model.model.layers[0], ParallelLayer) is is_parallel


def test_rounds_as_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFStableLmConfig, use_parallel_residual=True)
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_silent_fields_have_transformers_values():
    config = StableLmConfig.from_hf(RAW)
    silent = HFStableLmConfig(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.rms_norm_eps == silent.layer_norm_eps == 1e-5
    assert config.rotary_dim == 16 * silent.rope_parameters["partial_rotary_factor"] == 4
    assert config.qkv_bias is silent.use_qkv_bias is False
    assert config.is_parallel is silent.use_parallel_residual is False


@pytest.mark.parametrize(("field", "value"), [("qk_layernorm", True), ("rms_norm_eps", 1e-5)])
def test_fields_of_other_models_are_refused(field, value):
    with pytest.raises(UnsupportedModelError, match=f"{field} is {value}"):
        StableLmConfig.from_hf(RAW | {field: value})
