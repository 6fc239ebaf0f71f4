"""Which methods are read, and how others are refused: by their name, with the way out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints.quantized.writers import set_settings
from transformers import LlamaConfig as HFLlamaConfig

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.models.checkpoints.quantized.settings import Quantized
from quire.models.registry import load_config


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ"),
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "BitNet"),
        ({"quantization_config": {"quant_method": "quark"}}, "AMD Quark"),
        ({"quantization_config": {"quant_method": "exl2"}}, "EXL2"),
        ({"quantization_config": {"quant_method": "exl3"}}, "EXL3"),
        ({"quantization_config": {"quant_method": "x\ny"}}, r"'x\ny'"),
        ({"quantization_config": {"quant_method": ["a"]}}, "an unnamed method"),
        ({"quantization_config": [1]}, "an unnamed method"),
        ({"compression_config": {"quant_method": "bnb"}}, "bitsandbytes"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization": {"quant_method": "awq"}}, "MLX"),
    ],
)
def test_the_config_names_the_method(fields, method, tmp_path) -> None:
    # Whatever the architecture: that a family is not served would be half of the truth.
    config = {"architectures": ["GptOssForCausalLM"]} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(tmp_path)
    message = str(caught.value)
    assert f"weights quantized by {method} (as its {next(iter(fields))} says)" in message
    assert "name the original checkpoint" in message and "--quantization int8" in message
    assert len(message) < 500 and message.isprintable()


@pytest.mark.parametrize(
    ("suffix", "method"),
    [
        (".qweight", "GPTQ or AWQ"),
        (".weight_scale_inv", "fp8"),
        (".absmax", "bitsandbytes"),
        (".q_weight", "EXL2"),
        (".trellis", "EXL3"),
    ],
)
def test_else_the_names_of_the_weights_tell_it(suffix, method, save_checkpoint, load) -> None:
    folder, _ = save_checkpoint(HFLlamaConfig)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj{suffix}"] = torch.zeros(2)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=f"weights quantized by {method} .as its tensor"
    ):
        load(folder)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_config_says_how_its_weights_are_quantized(save_checkpoint) -> None:
    folder, _ = save_checkpoint(HFLlamaConfig)
    assert load_config(folder).quantized is None
    set_settings(folder, FP8)
    assert load_config(folder).quantized == Quantized("fp8")
    # A config of a multimodal model may say it of its language model alone.
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    assert load_config(folder).quantized == Quantized("fp8")


def test_override_of_quantization_config_is_refused(save_checkpoint) -> None:
    folder, _ = save_checkpoint(HFLlamaConfig)
    with pytest.raises(ConfigurationError, match="hf_overrides has quantization_config, but how"):
        load_config(folder, overrides={"quantization_config": FP8})


def test_a_bias_of_zeros_needs_no_place(save_checkpoint, assert_same_logits, load) -> None:
    """AutoGPTQ gives each linear a bias."""
    folder, model = save_checkpoint(HFLlamaConfig)
    tensors = load_file(folder / "model.safetensors")
    bias = torch.zeros(64)
    save_file(
        tensors | {"model.layers.1.self_attn.q_proj.bias": bias}, folder / "model.safetensors"
    )
    assert_same_logits(folder, model)
    bias[5] = 0.5
    save_file(
        tensors | {"model.layers.1.self_attn.q_proj.bias": bias}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which the model .* no place for"):
        load(folder)
