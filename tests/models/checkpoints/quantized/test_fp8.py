"""fp8 as DeepSeek, Qwen, Mistral and FBGEMM write it."""

import logging

import pytest
import torch
from tests.models.checkpoints.quantized.writers import (
    Tensors,
    fp8,
    rewrite,
)
from transformers import LlamaConfig as HFLlamaConfig

from quire.models.checkpoints.readers import open_checkpoint


def settings(**fields: object) -> dict[str, object]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | fields


@pytest.mark.parametrize(
    ("writer", "fields", "groups"),
    [
        (fp8((128, 128)), {"weight_block_size": [128, 128]}, None),  # larger than the weights
        (fp8((24, 40)), {"weight_block_size": [24, 40]}, None),  # the last ones are cut off
        (fp8((24, 40), dtype=torch.bfloat16), {"weight_block_size": [24, 40]}, None),
        (
            fp8((24, 32), dtype=torch.float8_e8m0fnu),
            {"weight_block_size": [24, 32], "scale_fmt": "ue8m0"},
            32,
        ),
        (fp8((0, 0), shape=[]), {"weight_block_size": None, "activation_scheme": "static"}, 0),
        (fp8((0, 0), "weight_scale", shape=[]), {}, 0),
        (fp8((1, 0), "weight_scale"), {"quant_method": "fbgemm_fp8", "fmt": None}, 0),
    ],
)
def test_scales_of_every_layout_are_read(
    writer, fields, groups, save_checkpoint, assert_read, load, caplog
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, numbers = writer(weight)
        unused = ("activation_scale", "k_scale", "kv_scale")
        return tensors | {name: torch.ones(()) for name in unused}, numbers

    kept = ["lm_head", "up_proj"]
    fields = settings(**fields) | {"modules_to_not_convert": kept}
    numbers = rewrite(folder, model, {"self_attn": write, "down_proj": writer}, fields)
    found = assert_read(folder, model, numbers)
    assert {each.group_size for each in found.values()} == ({groups} - {None})
    assert all(open_checkpoint(folder).stored_as(name) == "fp8" for name in numbers)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "its fp8 weights are decoded to float32, as these kernels have no layout" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2', but quire reads only e4m3"),
        ({"weight_block_size": [128]}, "weight_block_size is [128], but must be two numbers"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"activation_scheme": "static_block"}, "activation_scheme is 'static_block'"),
        ({"scale_fmt": "int"}, "scale_fmt is 'int'"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4', but quire reads only fp8"),
        ({"smooth": 0.5}, "the field smooth is 0.5, which quire does not understand"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(
    fields, message, assert_settings_refused
) -> None:
    assert_settings_refused(settings(**fields), message)


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("q_proj__weight_scale_inv", None, "but not model.layers.0.self_attn.q_proj.weight_scale"),
        ("q_proj__weight_scale_inv", torch.ones(4, 3), "has the shape [4, 3], but must have"),
        ("q_proj__weight_scale_inv", torch.ones(0), "has the shape [0], but must have"),
        ("q_proj__weight_scale_inv", torch.ones(2, 2).int(), "is stored as int32, but must be"),
        ("q_proj__weight", torch.ones(64, 64).byte(), "is stored as uint8, but must be float8"),
        ("q_proj__weight", torch.ones(2, 64, 64).to(torch.float8_e4m3fn), "has the shape [2, 64"),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, save_checkpoint, assert_tensor_refused
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    fields = settings(weight_block_size=[32, 32])
    rewrite(folder, model, {"q_proj": fp8((32, 32))}, fields)
    assert_tensor_refused(folder, ending, tensor, message)
