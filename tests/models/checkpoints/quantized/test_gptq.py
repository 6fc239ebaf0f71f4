"""GPTQ: both versions of its zeros, act-order, bits, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from tests.models.checkpoints.quantized.writers import (
    AUTO_ROUND,
    Tensors,
    Writer,
    add,
    change,
    mixed_up,
    rewrite,
    rounded,
    set_settings,
    side_by_side,
    words,
)
from transformers import LlamaConfig as HFLlamaConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.formats.block_quantized.linear_methods import PartsMethod
from quire.models.registry import load_config

ORDERS = {"plain": side_by_side, "act-order": mixed_up}


def gptq(
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = True,
    version: int = 1,
    order: Callable[[int, int], torch.Tensor] = side_by_side,
    has_index: bool = True,
) -> Writer:
    """size: -1: an output's scale is of all its inputs."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = order(weight.shape[1], weight.shape[1] if size == -1 else size)
        codes, scales, zeros, numbers = rounded(weight, groups, bits, symmetric, torch.float16)
        stored = words(zeros.T, bits)
        if version == 1:  # of whole words, as GPTQModel writes it
            stored = stored - (0x11111111 if bits == 4 else 0x01010101)
        tensors = {
            "qweight": words(codes, bits).T,
            "qzeros": stored,
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        if not has_index:
            del tensors["g_idx"]
        return tensors, numbers

    return write


def settings(**fields: object) -> dict[str, object]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "damp_percent": 0.01,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    } | fields


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_groups_and_zeros(order, symmetric, version, save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    writer = gptq(symmetric=symmetric, version=version, order=ORDERS[order])
    fields = {"sym": symmetric, "desc_act": order == "act-order"}
    fields |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    numbers = rewrite(folder, model, {"": writer}, settings(**fields))
    block_formats = assert_read(folder, model, numbers)
    assert block_formats.keys() == numbers.keys()
    for block_format in block_formats.values():
        assert (block_format.width, block_format.group_size) == (4, 32)
        assert (block_format.has_zeros, block_format.zero) == (
            (False, 8) if symmetric else (True, 0)
        )
        assert (block_format.input_order is not None) == (order == "act-order")


@pytest.mark.parametrize(
    ("writer", "fields"),
    [
        (gptq(8), {"bits": 8}),
        (gptq(8, symmetric=False), {"bits": 8, "sym": False}),
        (gptq(size=-1), {"group_size": -1}),
        (gptq(size=-1, order=mixed_up), {"group_size": -1, "desc_act": True}),
        (gptq(has_index=False), {}),
        (gptq(size=-1, has_index=False), {"group_size": -1}),
        (gptq(symmetric=False), {"checkpoint_format": "gptq", "format": "gptq"}),
    ],
)
def test_bits_and_whole_rows(writer, fields, save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": writer}, settings(**fields))
    assert assert_read(folder, model, numbers).keys() == numbers.keys()


def test_groups_that_are_unlike_become_numbers(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)

    def uneven(num_inputs: int, size: int) -> torch.Tensor:
        groups = mixed_up(num_inputs, size)
        groups[groups.argmax()] = 0
        return groups

    numbers = rewrite(folder, model, {"": gptq(order=uneven)}, settings(desc_act=True))
    assert not assert_read(folder, model, numbers)
    # So do groups of which the last is smaller, and those of a size that is no multiple of 32.
    other, model = save_checkpoint(HFLlamaConfig)
    writers = {"q_proj": gptq(size=40, has_index=False), "v_proj": gptq(size=16)}
    numbers = rewrite(other, model, writers, settings(group_size=40))
    assert not assert_read(other, model, numbers)


def test_linears_may_differ_and_be_plain(save_checkpoint, assert_read) -> None:
    """As GPTQModel's `dynamic` says."""
    folder, model = save_checkpoint(HFLlamaConfig)
    writers = {"o_proj": gptq(8), "down_proj": gptq(), "q_proj": gptq(size=64)}
    dynamic = {"+:.*o_proj": {"bits": 8}, "-:.*up_proj": {}}
    numbers = rewrite(folder, model, writers, settings(dynamic=dynamic))
    block_formats = assert_read(folder, model, numbers)
    assert {block_format.width for block_format in block_formats.values()} == {4, 8}
    assert {block_format.group_size for block_format in block_formats.values()} == {32, 64}


def test_parts_share_a_method_where_their_orders_are_equal(
    save_checkpoint, run, load_quantized_model
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    other = gptq(order=lambda inputs, size: mixed_up(inputs, size, seed=5))
    same = gptq(order=mixed_up)
    writers = {"k_proj": other, "self_attn": same, "mlp": same}
    rewrite(folder, model, writers, settings(desc_act=True))
    loaded = load_quantized_model(folder)
    layer = loaded.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj.method, PartsMethod)
    assert not isinstance(layer.mlp.gate_up_proj.method, PartsMethod)
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    assert (run(loaded, ids, [17]) - expected).norm() / expected.norm() < 1e-1


def test_settings_of_auto_rounds_search_change_nothing(save_checkpoint, assert_read) -> None:
    folder, model = save_checkpoint(HFLlamaConfig)
    numbers = rewrite(folder, model, {"": gptq()}, settings(**AUTO_ROUND))
    assert assert_read(folder, model, numbers).keys() == numbers.keys()
    set_settings(folder, settings(**AUTO_ROUND | {"act_bits": 8}))
    with pytest.raises(UnsupportedModelError, match="act_bits is 8, but quire reads only 16"):
        load_config(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits is 3, but quire reads only 4, 8; name the original"),
        ({"bits": 2}, "bits is 2"),
        ({"bits": None}, "bits is None"),
        ({"bits": "4"}, "bits is '4'"),
        ({"group_size": 0}, "group_size is 0, but must be a number of inputs, or -1"),
        ({"group_size": 1.5}, "group_size is 1.5"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', but quire reads only"),
        ({"format": "gptq_p"}, "format is 'gptq_p'"),
        ({"is_marlin_format": True}, "is_marlin_format is True"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"residual": 1}, "the field residual is 1, which quire does not understand"),
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
        ("q_proj__qzeros", torch.zeros(2, 7).int(), "has the shape [2, 7], but must have [2, 8]"),
        ("q_proj__scales", torch.ones(2, 63), "has the shape [2, 63], but must have [2, 64]"),
        ("q_proj__scales", torch.ones(0, 64), "has the shape [0, 64]"),
        ("q_proj__scales", torch.ones(2, 64).double(), "is stored as float64, but must be"),
        ("q_proj__qweight", torch.zeros(8), "is stored as float32, but must be int32"),
        ("q_proj__qweight", torch.zeros(0, 64).int(), "has the shape [0, 64]"),
        (
            "q_proj__qweight",
            torch.zeros(6, 64).int(),
            "has 192 bits for the 64 inputs of its g_idx",
        ),
        ("q_proj__qweight", torch.zeros(16, 64).int(), "has 512 bits for the 64 inputs of its"),
        ("q_proj__g_idx", torch.full((64,), 2).int(), "names the group 2, but there are 2"),
        ("q_proj__g_idx", torch.full((64,), -1).int(), "names the group -1, but there are 2"),
        ("q_proj__g_idx", torch.zeros(2, 32).int(), "has the shape [2, 32], but must have 1"),
    ],
)
def test_tensors_that_do_not_fit_end_in_a_sentence(
    ending, tensor, message, save_checkpoint, assert_tensor_refused
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    rewrite(folder, model, {"q_proj": gptq(order=mixed_up)}, settings(desc_act=True))
    assert_tensor_refused(folder, ending, tensor, message)


def test_a_weight_that_is_there_twice_is_refused(save_checkpoint, load) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, num_hidden_layers=1)
    rewrite(folder, model, {"q_proj": gptq()}, settings())
    change(folder, q_proj__g_idx=None)
    add(folder, {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight'; leave one of them out"):
        load(folder)
