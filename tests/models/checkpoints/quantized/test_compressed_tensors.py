"""compressed-tensors: each format and strategy, and what is refused."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.checkpoints.quantized.writers import (
    Tensors,
    Writer,
    add,
    change,
    fp8,
    mixed_up,
    mxfp4_blocks,
    rewrite,
    rounded,
    set_settings,
    side_by_side,
    words,
)
from transformers import LlamaConfig as HFLlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import CheckpointError
from quire.formats.int8 import GivenInt8TorchMethod
from quire.models.registry import load_config

TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def settings(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    } | fields


def packed(
    bits: int,
    size: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    order: Callable[[int, int], torch.Tensor] = side_by_side,
) -> Writer:
    """size: 0: an output's scale is of all its inputs."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = order(weight.shape[1], size or weight.shape[1])
        codes, scales, zeros, numbers = rounded(weight, groups, bits, symmetric, dtype)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        if order is not side_by_side:
            tensors["weight_g_idx"] = groups.int()
        return tensors, numbers

    return write


def bytes_of(
    size: int, *, symmetric: bool = True, per_tensor: bool = False, dtype: torch.dtype
) -> Writer:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        whole = weight.reshape(1, -1) if per_tensor else weight
        groups = side_by_side(whole.shape[1], size or whole.shape[1])
        codes, scales, zeros, numbers = rounded(whole, groups, 8, symmetric, dtype)
        tensors = {
            "weight": (codes - 128).to(torch.int8).view_as(weight),
            "weight_scale": scales.view(1) if per_tensor else scales,
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, numbers.view_as(weight)

    return write


@pytest.mark.parametrize(
    ("writer", "group_size"),
    [
        (packed(4, 32), 32),
        (packed(4, 32, symmetric=False), 32),
        (packed(4, 0), 32),  # the largest that divides 64 and 96 alike is 32
        (packed(4, 0, symmetric=False, dtype=torch.float16), 32),
        (packed(8, 32), 32),
        (packed(8, 0, symmetric=False), 32),
        (packed(4, 32, order=mixed_up), 32),
        (packed(4, 32, symmetric=False, order=mixed_up), 32),
        (packed(4, 16), None),
        (packed(4, 32, dtype=torch.float32), None),
    ],
)
def test_packed_weights(writer, group_size, save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": writer}, settings("pack-quantized", {}))
    block_formats = assert_read(folder, model, numbers)
    if group_size is None:
        assert not block_formats
        return
    assert block_formats.keys() == numbers.keys()
    sizes = {block_format.group_size for block_format in block_formats.values()}
    assert sizes <= {32, 64} and group_size in sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_int8_weights_and_activations_are_those_of_int8(
    dtype, per_tensor, save_checkpoint, assert_read, load_quantized_model
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    writer = bytes_of(0, per_tensor=per_tensor, dtype=dtype)
    scheme = settings("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKENS)
    numbers = rewrite(folder, model, {"": writer}, scheme)
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    assert all(block_format.is_int8 for block_format in block_formats.values())
    method = load_quantized_model(folder).model.layers[0].self_attn.qkv_proj.method
    assert isinstance(method, GivenInt8TorchMethod)


def test_int8_weights_otherwise_are_codes_of_groups(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    writers = {
        "q_proj": bytes_of(32, dtype=torch.bfloat16),
        "down_proj": bytes_of(0, symmetric=False, dtype=torch.float16),
    }
    scheme = settings("int-quantized", {"num_bits": 8, "strategy": "group"}, TOKENS)
    numbers = rewrite(folder, model, writers, scheme)
    block_formats = assert_read(folder, model, numbers)
    assert {block_format.group_size for block_format in block_formats.values()} == {32}
    assert {block_format.has_zeros for block_format in block_formats.values()} == {False, True}


def test_groups_of_linears_and_plain_ones_are_mixed(save_checkpoint, assert_read) -> None:
    """Which linear is in which group is seen in the files, whatever the patterns say."""
    folder, model = save_checkpoint(HFLlamaConfig)
    attention = settings("pack-quantized", {"strategy": "group", "group_size": 32})
    mlp = settings("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKENS)
    scheme = attention | {"format": "mixed-precision", "ignore": ["lm_head", "re:.*up_proj"]}
    scheme["config_groups"] = {
        "first": attention["config_groups"]["group_0"]
        | {"targets": ["re:(a+)+.*self_attn.*"], "format": "pack-quantized"},
        "second": mlp["config_groups"]["group_0"]
        | {"targets": ["re:.*mlp.*"], "format": "int-quantized"},
    }
    writers = {
        "self_attn": packed(4, 32, symmetric=False),
        "gate_proj": bytes_of(0, dtype=torch.bfloat16),
        "down_proj": bytes_of(0, dtype=torch.bfloat16),
    }
    numbers = rewrite(folder, model, writers, scheme)
    block_formats = assert_read(folder, model, numbers)
    assert len(block_formats) == 3 * 6
    assert {block_format.name for block_format in block_formats.values()} == {"W4A16", "W8A8"}


@pytest.mark.parametrize(
    ("strategy", "block", "shape"),
    [
        ("tensor", (0, 0), [1]),
        ("tensor", (0, 0), []),
        ("channel", (1, 0), None),
        ("block", (128, 128), None),
        ("block", (48, 40), None),
        ("block", (48, 32), None),
    ],
)
def test_fp8_weights_are_read(
    strategy, block, shape, save_checkpoint, assert_read, load, caplog
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    inputs = TOKENS | {"type": "float"}
    scheme = settings("float-quantized", weights, inputs)
    writer = fp8(block, "weight_scale", torch.bfloat16, shape)
    numbers = rewrite(folder, model, {"": writer}, scheme)
    keeps = strategy != "block" or block[1] == 32
    assert assert_read(folder, model, numbers).keys() == (numbers.keys() if keeps else set())
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "its fp8 weights are decoded to float32, as these kernels have no layout" in caplog.text


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks, scales = mxfp4_blocks(weight)
    numbers = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, numbers


def test_mxfp4_weights(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    weights = {"type": "float", "strategy": "group", "group_size": 32}
    scheme = settings("mxfp4-pack-quantized", weights)
    numbers = rewrite(folder, model, {"": mxfp4}, scheme)
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    assert {block_format.name for block_format in block_formats.values()} == {"MXFP4"}


def test_tensors_for_activations_and_the_cache_are_left_out(
    save_checkpoint, assert_read, load, caplog
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, numbers = bytes_of(0, dtype=torch.bfloat16)(weight)
        return tensors | {"input_scale": torch.ones(1), "input_zero_point": torch.ones(1)}, numbers

    static = TOKENS | {"strategy": "tensor", "dynamic": False}
    weights = {"num_bits": 8, "strategy": "channel"}
    scheme = settings("int-quantized", weights, static, kv_cache_scheme={"num_bits": 8})
    numbers = rewrite(folder, model, {"": write}, scheme)
    # A place in the file that llm-compressor uses.
    change(folder, layers__0__self_attn__q_proj__input_zero_point=None)
    add(folder, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    assert_read(folder, model, numbers)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "its scales of keys and values (kv_cache_scheme) are left out" in caplog.text
    assert "not as its input_activations say" in caplog.text


PLAIN = settings("pack-quantized", {"strategy": "group", "group_size": 32})


def test_groups_of_which_one_keeps_activations_are_told(save_checkpoint) -> None:
    folder, _ = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    fields = settings("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKENS)
    other = fields["config_groups"]["group_0"] | {"input_activations": None}
    for groups, is_told in (({}, False), ({"group_1": other}, True)):
        all_of_them = {"config_groups": fields["config_groups"] | groups}
        set_settings(folder, fields | all_of_them)
        quantized = load_config(folder).quantized
        assert quantized is not None
        assert any("config_groups without" in each for each in quantized.remarks) == is_told


def test_files_of_2024_call_weights_frozen_and_scales_of_the_cache_those_of_outputs(
    save_checkpoint, assert_read
) -> None:
    """As nm-testing/Meta-Llama-3.1-8B-Instruct-FP8-hf, and files with a kv_cache_scheme."""
    folder, model = save_checkpoint(HFLlamaConfig)
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    fields = PLAIN | {"quantization_status": "frozen", "kv_cache_scheme": cache}
    numbers = rewrite(folder, model, {"": packed(4, 32)}, fields)
    scales = {f"model.layers.0.self_attn.{part}_proj.output_scale" for part in "kv"}
    add(folder, {name: torch.ones(1) for name in scales})
    assert assert_read(folder, model, numbers).keys() == numbers.keys()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "marlin-24", "format is 'marlin-24', but quire reads only pack-quantized"),
        (("format",), None, "format is None"),
        (("quantization_status",), "calibration", "quantization_status is 'calibration'"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "format is 'sparse-24-bitmask'"),
        (("sparsity_config",), [1], "sparsity_config is [1], but must be an object"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "the field transform_config is"),
        (("config_groups",), {}, "config_groups is {}, but must say how"),
        (("config_groups", "group_0"), 3, "group_0 is 3, but must be an object"),
        (("config_groups", "group_0", "weights"), None, "rounds activations but not weights"),
        (("config_groups", "group_0", "weights", "num_bits"), 3, "num_bits is 3, but quire"),
        (("config_groups", "group_0", "weights", "num_bits"), True, "num_bits is True"),
        (("config_groups", "group_0", "weights", "type"), "nf", "type is 'nf'"),
        (("config_groups", "group_0", "weights", "strategy"), "tensor_group", "is 'tensor_group'"),
        (("config_groups", "group_0", "weights", "dynamic"), True, "dynamic is True"),
        (("config_groups", "group_0", "weights", "rotation"), "x", "the field rotation is 'x'"),
        (("config_groups", "group_0", "weights", "block_structure"), [1, 0], "two numbers above"),
        (("config_groups", "group_0", "output_activations"), {"a": 1}, "output_activations is"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 6}, "num_bits is 6"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(
    path, value, message, assert_settings_refused
) -> None:
    scheme = copy.deepcopy(PLAIN)
    inner = scheme
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert_settings_refused(scheme, message)


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("q_proj__weight_scale", None, "but not model.layers.0.self_attn.q_proj.weight_scale"),
        ("q_proj__weight_shape", None, "but not model.layers.0.self_attn.q_proj.weight_shape"),
        ("q_proj__weight_scale", torch.ones(64, 3), "has 3 groups for 64 inputs"),
        ("q_proj__weight_scale", torch.ones(63, 2), "has the shape [63, 2], but must have [64, 2]"),
        ("q_proj__weight_scale", torch.ones(64, 2).int(), "is stored as int32, but must be"),
        ("q_proj__weight_shape", torch.tensor([64, 80]), "for a weight of [64, 80], but quire"),
        ("q_proj__weight_shape", torch.tensor([64, -1]), "for a weight of [64, -1], but quire"),
        ("q_proj__weight_packed", torch.zeros(0, 8).int(), "has the shape [0, 8], but must have 2"),
        ("q_proj__weight_packed", torch.zeros(2, 64, 8).int(), "has the shape [2, 64, 8], but"),
        ("q_proj__weight_zero_point", torch.zeros(7, 2).int(), "but must have [8, 2]"),
        ("q_proj__weight_g_idx", torch.full((64,), 2).int(), "names the group 2, but there are 2"),
        ("q_proj__weight_g_idx", -torch.ones(64).int() * 7, "names the group -7, but there are 2"),
        ("q_proj__weight_g_idx", torch.zeros(63).int(), "has the shape [63], but must have [64]"),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, save_checkpoint, assert_tensor_refused
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    writer = packed(4, 32, symmetric=False, order=mixed_up)
    rewrite(folder, model, {"q_proj": writer}, PLAIN)
    assert_tensor_refused(folder, ending, tensor, message)


def test_weights_that_are_not_compressed_yet_are_refused(save_checkpoint, load) -> None:
    folder, _ = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    add(folder, {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(64, 1)})
    set_settings(folder, PLAIN)
    with pytest.raises(CheckpointError, match="as before it was compressed; save the model"):
        load(folder)
