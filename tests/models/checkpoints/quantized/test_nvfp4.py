"""NVFP4 as ModelOpt and compressed-tensors store it: numbers, settings, and broken tensors."""

import pytest
import torch
from tests.models.checkpoints.quantized.test_compressed_tensors import settings
from tests.models.checkpoints.quantized.writers import nvfp4, rewrite, set_settings
from transformers import LlamaConfig as HFLlamaConfig
from transformers import Qwen3MoeConfig as HFQwen3MoeConfig

from quire.models.registry import load_config

OF_MODELOPT = nvfp4("weight", "weight_scale_2")
OF_COMPRESSED = nvfp4("weight_packed", "weight_global_scale", is_reciprocal=True)
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"input_activations": {"num_bits": 4}, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
COMPRESSED = settings("nvfp4-pack-quantized", FLOAT4, FLOAT4 | {"dynamic": "local"})


@pytest.mark.parametrize(
    ("writer", "fields"),
    [(OF_MODELOPT, MODELOPT), (OF_COMPRESSED, COMPRESSED)],
    ids=["modelopt", "compressed-tensors"],
)
def test_weights_are_codes_with_float_scales(writer, fields, save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": writer}, fields)
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    for block_format in block_formats.values():
        assert (block_format.name, block_format.group_size) == ("NVFP4", 16)
        assert block_format.has_output_factors
    quantized = load_config(folder).quantized
    assert quantized is not None
    assert any("not rounded to NVFP4 (W4A4)" in remark for remark in quantized.remarks)


def test_experts_are_read_one_by_one(save_checkpoint, assert_read) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder, model = save_checkpoint(HFQwen3MoeConfig, num_hidden_layers=1, **sizes)
    fields = MODELOPT | {"quant_method": "modelopt_fp4", "kv_cache_scheme": None}
    numbers = rewrite(folder, model, {"_proj": OF_MODELOPT}, fields)
    assert assert_read(folder, model, numbers).keys() == numbers.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8', but quire reads only NVFP4"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'"),
        ({"quant_algo": None}, "quant_algo is None"),
        ({"group_size": 32}, "group_size is 32, but quire reads only 16"),
        ({"rotation": "x"}, "the field rotation is 'x'"),
    ],
)
def test_settings_that_are_not_read_are_refused(changes, message, assert_settings_refused) -> None:
    assert_settings_refused(MODELOPT | changes, message)


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("q_proj__weight_scale", None, "but not model.layers.0.self_attn.q_proj.weight_scale"),
        ("q_proj__weight_scale", torch.ones(64, 4), "is stored as float32, but must be float8"),
        ("q_proj__weight_scale_2", None, "q_proj.weight_scale_2"),
        ("q_proj__weight_scale_2", torch.zeros(1), "is 0.0, but must be a positive number"),
        ("q_proj__weight_scale_2", torch.tensor(torch.nan), "is nan, but must be a positive"),
        ("q_proj__weight", torch.zeros(64, 28).byte(), "has 56 inputs, which is no multiple"),
        (
            "q_proj__weight_scale",
            torch.full((64, 4), -1.0).to(torch.float8_e4m3fn),
            "has scales that are negative or no numbers",
        ),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, save_checkpoint, assert_tensor_refused
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    rewrite(folder, model, {"": OF_MODELOPT}, MODELOPT)
    set_settings(folder, MODELOPT)
    assert_tensor_refused(folder, ending, tensor, message)
