"""Linears: fused parts, how they may be sharded, other methods, and the adapter slot."""

import pytest
import torch
from torch.nn import functional

from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearMethod, empty_parameter
from quire.layers.linear import Linear, LinearKind, without_weights

CPU = torch.device("cpu")


def _linear(part_sizes=(6, 2, 4), kind=LinearKind.COLUMN, bias=True, dtype=torch.float32):
    linear = Linear(5, part_sizes, kind, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def _x():
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_multiplies_as_torch_does(bias):
    linear = _linear(bias=bias)
    expected = functional.linear(_x(), linear.weight, linear.bias)
    assert torch.equal(linear(_x()), expected)
    assert (linear.bias is not None) is bias
    assert dict(linear.named_parameters()).keys() == ({"weight", "bias"} if bias else {"weight"})


@pytest.mark.parametrize(
    ("kind", "axis"),
    [(LinearKind.COLUMN, 0), (LinearKind.ROW, 1), (LinearKind.REPLICATED, None)],
)
def test_declares_how_it_is_sharded(kind, axis):
    linear = _linear(kind=kind)
    assert (linear.kind, linear.shard_axis) == (kind, axis)


def _fill(linear, tensors, *, rows_at_once=100):
    """tensors: (parameter, part) -> its numbers; loaded in slices, the last ones first."""
    slots = linear.slots()
    assert {key: slot.shape for key, slot in slots.items()} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items()
    }
    for key, tensor in tensors.items():
        for start in reversed(range(0, len(tensor), rows_at_once)):
            slots[key].load(start, tensor[start : start + rows_at_once])
    linear.finish()


def _parts(part_sizes=(6, 2, 4)):
    generator = torch.Generator().manual_seed(2)
    shapes = {("weight", index): (size, 5) for index, size in enumerate(part_sizes)}
    shapes |= {("bias", index): (size,) for index, size in enumerate(part_sizes)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_parts_lie_one_after_the_other(rows_at_once):
    linear, parts = _linear(), _parts()
    _fill(linear, parts, rows_at_once=rows_at_once)
    for name in ("weight", "bias"):
        expected = torch.cat([parts[name, index] for index in range(3)])
        assert torch.equal(linear.get_parameter(name), expected)


def test_linear_without_bias_has_only_weight_slots():
    assert set(_linear(bias=False).slots()) == {("weight", 0), ("weight", 1), ("weight", 2)}


def test_loaded_weights_are_converted_to_the_linears_dtype():
    linear, parts = _linear(dtype=torch.bfloat16), _parts()
    _fill(linear, parts)
    assert torch.equal(linear.weight[:6], parts["weight", 0].bfloat16())


def test_a_fused_linear_equals_its_parts():
    linear, parts = _linear(), _parts()
    _fill(linear, parts)
    separate = [
        functional.linear(_x(), parts["weight", index], parts["bias", index]) for index in range(3)
    ]
    torch.testing.assert_close(linear(_x()), torch.cat(separate, -1))


def test_gate_and_up_become_one_output():
    linear = Linear(
        5, (4, 4), LinearKind.COLUMN, bias=True, dtype=torch.float32, device=CPU, gated=True
    )
    _fill(linear, _parts((4, 4)))
    gate, up = linear(_x()).chunk(2, -1)
    torch.testing.assert_close(linear.silu_mul(_x()), functional.silu(gate) * up)
    linear.adapter = lambda x, output: output + 1
    torch.testing.assert_close(linear.silu_mul(_x()), functional.silu(gate + 1) * (up + 1))


def test_parameters_have_the_dtype_asked_for_and_are_not_trained():
    linear = _linear(dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in linear.parameters())
    assert not any(parameter.requires_grad for parameter in linear.parameters())
    assert linear(_x().bfloat16()).dtype == torch.bfloat16


class TransposedMethod(LinearMethod):
    """Stores the weight as [I, O]: another layout with other parameter names."""

    def create(self, linear, bias, dtype, device):
        size = (linear.input_size, linear.output_size)
        linear.register_parameter("packed", empty_parameter(size, dtype, device))
        linear.register_parameter(
            "bias", empty_parameter(size[1:], dtype, device) if bias else None
        )

    def load_part(self, linear, parameter, index, first_row, rows):
        start = linear.part_start(index) + first_row
        target = linear.get_parameter("packed" if parameter == "weight" else parameter)
        target[..., start : start + len(rows)] = rows.T if parameter == "weight" else rows

    def finish(self, linear):
        linear.is_finished = True

    def num_bytes(self, num_outputs, num_inputs, dtype):
        return num_outputs * num_inputs * dtype.itemsize

    def apply(self, linear, x, out_dtype=None):
        return torch.addmm(linear.bias, x, linear.packed)


def test_another_method_takes_over_from_outside():
    plain, packed = _linear(), _linear()
    packed.use(TransposedMethod(), torch.float32, CPU)
    assert {name for name, _ in packed.named_parameters()} == {"packed", "bias"}
    for linear in (plain, packed):
        _fill(linear, _parts(), rows_at_once=3)
    assert packed.is_finished
    torch.testing.assert_close(packed(_x()), plain(_x()))


def test_an_adapter_adds_to_the_output():
    linear = _linear()
    down, up = torch.ones(2, 5), torch.arange(24.0).reshape(12, 2)
    expected = linear(_x()) + _x() @ down.T @ up.T
    linear.adapter = lambda x, output: output + x @ down.T @ up.T
    torch.testing.assert_close(linear(_x()), expected)


def test_has_no_memory_before_a_method_takes_over_where_one_will():
    with without_weights():
        linear = Linear(5, (4,), LinearKind.COLUMN, bias=True, dtype=torch.float32, device=CPU)
    assert {parameter.device.type for parameter in linear.parameters()} == {"meta"}
    linear.use(DenseMethod(), torch.float32, CPU)
    assert {parameter.device.type for parameter in linear.parameters()} == {"cpu"}
    assert _linear().weight.device == CPU
