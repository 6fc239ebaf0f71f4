"""AWQ's gemm layout, and what is refused."""

import pytest
import torch
from tests.models.checkpoints.quantized.writers import (
    AUTO_ROUND,
    AWQ_ORDER,
    Tensors,
    Writer,
    rewrite,
    rounded,
    set_settings,
    side_by_side,
    words,
)
from transformers import LlamaConfig as HFLlamaConfig

from quire.errors import UnsupportedModelError
from quire.models.registry import load_config


def awq(size: int = 32, dtype: torch.dtype = torch.float16) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = side_by_side(weight.shape[1], size if size > 0 else weight.shape[1])
        codes, scales, zeros, numbers = rounded(weight, groups, 4, False, dtype)
        tensors = {
            "qweight": words(codes.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T,
        }
        return tensors, numbers

    return write


def settings(**fields: object) -> dict[str, object]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    } | fields


@pytest.mark.parametrize(
    ("writer", "fields"),
    [
        (awq(), {}),
        (awq(dtype=torch.bfloat16), {"version": "GEMM"}),
        (awq(-1), {"group_size": -1, "zero_point": False}),  # as GPTQModel has it
        (awq(), {"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 32}),
        (awq(), {"version": None, "format": "gemm", "checkpoint_format": "gemm", "sym": False}),
    ],
)
def test_weights_are_codes(writer, fields, save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": writer}, settings(**fields))
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    assert {block_format.name for block_format in block_formats.values()} == {"AWQ"}
    assert all(
        block_format.has_zeros and block_format.width == 4
        for block_format in block_formats.values()
    )


def test_small_groups_become_numbers_and_plain_linears_stay(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"mlp": awq(16)}, settings(group_size=16))
    assert numbers and not assert_read(folder, model, numbers)


def test_settings_of_auto_rounds_search_change_nothing(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": awq()}, settings(**AUTO_ROUND))
    assert assert_read(folder, model, numbers).keys() == numbers.keys()
    set_settings(folder, settings(**AUTO_ROUND | {"act_bits": 8}))
    with pytest.raises(UnsupportedModelError, match="act_bits is 8, but quire reads only 16"):
        load_config(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "gemv"}, "version is 'gemv', but quire reads only gemm; name the original"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"format": "llm-awq"}, "format is 'llm-awq'"),
        ({"version": 3}, "version is 3"),
        ({"bits": 8}, "bits is 8, but quire reads only 4"),
        ({"bits": None}, "bits is None"),
        ({"zero_point": "some"}, "zero_point is 'some'"),
        ({"group_size": "all"}, "group_size is 'all'"),
        ({"rotation": {"a": 1}}, "the field rotation is {'a': 1}, which quire"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(
    fields, message, assert_settings_refused
) -> None:
    assert_settings_refused(settings(**fields), message)


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("q_proj__scales", None, "but not model.layers.0.self_attn.q_proj.scales"),
        ("q_proj__qzeros", None, "but not model.layers.0.self_attn.q_proj.qzeros"),
        ("q_proj__qzeros", torch.zeros(3, 8).int(), "has the shape [3, 8], but must have [2, 8]"),
        ("q_proj__scales", torch.ones(2, 60), "has the shape [2, 60], but must have [2, 64]"),
        ("q_proj__qweight", torch.zeros(60, 8).int(), "has 60 inputs, which are not groups of 32"),
        ("q_proj__qweight", torch.zeros(64, 0).int(), "has the shape [64, 0]"),
        ("q_proj__qweight", torch.zeros(64, 8).long(), "is stored as int64, but must be int32"),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, save_checkpoint, assert_tensor_refused
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    rewrite(folder, model, {"q_proj": awq()}, settings())
    assert_tensor_refused(folder, ending, tensor, message)
