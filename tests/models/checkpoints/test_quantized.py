"""Checkpoints that others have quantized are refused by their method's name, with the way out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as HFLlamaConfig

from quire.errors import UnsupportedModelError
from quire.models.registry import load_config


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "x\ny"}}, r"'x\ny'"),
        ({"quantization_config": {"quant_method": ["a"]}}, "an unnamed method"),
        ({"quantization_config": [1]}, "an unnamed method"),
        ({"compression_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)
def test_the_config_names_the_method(fields, method, tmp_path):
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
    [(".qweight", "GPTQ or AWQ"), (".weight_scale_inv", "fp8"), (".absmax", "bitsandbytes")],
)
def test_else_the_names_of_the_weights_tell_it(suffix, method, save_checkpoint, load):
    folder, _ = save_checkpoint(HFLlamaConfig)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj{suffix}"] = torch.zeros(2)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=f"weights quantized by {method} .as its tensor"
    ):
        load(folder)
