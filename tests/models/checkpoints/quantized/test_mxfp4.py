"""MXFP4 as gpt-oss has its experts, against transformers' own unpacking."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints.quantized.writers import mxfp4_blocks, set_settings
from transformers import GptOssConfig as HFGptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.checkpoints.quantized.mxfp4 import powers_of_two
from quire.models.registry import load_config

SIZES = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9}
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture
def packed_model(save_checkpoint):
    folder, model = save_checkpoint(HFGptOssConfig, **SIZES)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4_blocks(tensors.pop(name).float().transpose(1, 2))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            model.get_parameter(name).copy_(whole)
        path, _, linear = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if linear == "gate_up_proj" else ("down_proj",)
        for expert in range(5):
            for index, part in enumerate(parts):
                rows = whole[expert].T[index :: len(parts)]
                numbers[f"{path}.{expert}.{part}.weight"] = rows
    save_file(tensors, folder / "model.safetensors")
    set_settings(folder, SETTINGS)
    return folder, model, numbers


def test_experts_are_codes_of_a_table(packed_model, assert_read) -> None:
    folder, model, numbers = packed_model
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    for block_format in block_formats.values():
        assert (block_format.name, block_format.width, block_format.group_size) == ("MXFP4", 4, 32)
        assert block_format.scale_dtype == torch.bfloat16 and block_format.table is not None


def test_scales_are_exact_powers_of_two() -> None:
    found = powers_of_two(torch.arange(255, dtype=torch.uint8), "scales").double()
    assert found.tolist() == [2.0 ** (stored - 128) for stored in range(255)]
    with pytest.raises(CheckpointError, match=r"sc\.ales has scales that are no numbers"):
        powers_of_two(torch.tensor([3, 255], dtype=torch.uint8), "sc.ales")


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("0__mlp__experts__down_proj_scales", None, "but not model.layers.0.mlp.experts.down_proj"),
        ("gate_up_proj_scales", torch.zeros(5, 192, 3).byte(), "but must have [5, 192, 2]"),
        ("gate_up_proj_blocks", torch.zeros(5, 191, 2, 16).byte(), "even number of rows and 16"),
        ("gate_up_proj_blocks", torch.zeros(5, 192, 2, 8).byte(), "even number of rows and 16"),
        ("gate_up_proj_blocks", torch.zeros(5, 192, 32).byte(), "but must have 4 dimensions"),
        ("gate_up_proj_blocks", torch.zeros(5, 192, 2, 16), "is stored as float32, but must be"),
        (
            "down_proj_blocks",
            torch.zeros(65537, 2, 1, 16).byte(),
            "has 65537 experts, but at most",
        ),
        ("down_proj_blocks", torch.zeros(0, 64, 3, 16).byte(), "has the shape [0, 64, 3, 16]"),
        ("down_proj_blocks", torch.zeros(4, 64, 3, 16).byte(), "but must have [4, 64, 3]"),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, packed_model, assert_tensor_refused
) -> None:
    folder, _, _ = packed_model
    assert_tensor_refused(folder, ending, tensor, message)


def test_a_setting_that_is_not_known_is_refused(packed_model) -> None:
    folder, _, _ = packed_model
    set_settings(folder, SETTINGS | {"rotation": "hadamard"})
    with pytest.raises(UnsupportedModelError, match="the field rotation is 'hadamard', which"):
        load_config(folder)
