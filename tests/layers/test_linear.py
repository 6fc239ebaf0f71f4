"""Linears: fused parts, how they may be sharded, other methods, and the adapter slot."""

import pytest
import torch
from torch.nn import functional

from quire.layers.linear import Linear, LinearKind, LinearMethod, empty_parameter

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


def test_parts_are_views_that_tile_the_parameters():
    linear = _linear()
    for name, parameter in linear.named_parameters():
        parts = [linear.part(name, index) for index in range(3)]
        assert [len(part) for part in parts] == [6, 2, 4]
        assert torch.equal(torch.cat(parts), parameter)
        for index, part in enumerate(parts):
            part.fill_(index)
    assert linear.bias.tolist() == [0.0] * 6 + [1.0] * 2 + [2.0] * 4
    assert linear.weight[:, 0].tolist() == linear.bias.tolist()


def test_a_fused_linear_equals_its_parts():
    linear = _linear()
    separate = [
        functional.linear(_x(), linear.part("weight", index), linear.part("bias", index))
        for index in range(3)
    ]
    torch.testing.assert_close(linear(_x()), torch.cat(separate, -1))


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

    def apply(self, linear, x):
        return torch.addmm(linear.bias, x, linear.packed)

    def part(self, linear, parameter, index):
        start = sum(linear.part_sizes[:index])
        columns = slice(start, start + linear.part_sizes[index])
        return linear.get_parameter(parameter)[..., columns]


def test_another_method_takes_over_from_outside():
    plain, packed = _linear(), _linear()
    packed.use(TransposedMethod(), torch.float32, CPU)
    assert {name for name, _ in packed.named_parameters()} == {"packed", "bias"}
    for index in range(3):
        packed.part("packed", index).copy_(plain.part("weight", index).T)
        packed.part("bias", index).copy_(plain.part("bias", index))
    torch.testing.assert_close(packed(_x()), plain(_x()))


def test_an_adapter_adds_to_the_output():
    linear = _linear()
    down, up = torch.ones(2, 5), torch.arange(24.0).reshape(12, 2)
    expected = linear(_x()) + _x() @ down.T @ up.T
    linear.adapter = lambda x, output: output + x @ down.T @ up.T
    torch.testing.assert_close(linear(_x()), expected)
