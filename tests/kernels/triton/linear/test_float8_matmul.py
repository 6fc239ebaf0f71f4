"""Products of e4m3 codes in the interpreter: their numbers, and the same bits in any batch."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cpu.test_float8 import random_codes
from tests.kernels.triton.products import assert_close, exact, numbers, padded, surrounded

from quire.kernels.activations import Gating, gated
from quire.kernels.triton.linear import matmul as module
from quire.kernels.triton.linear.float8_rows import unpack_float8_rows
from quire.kernels.triton.linear.group_plan import plan_groups
from quire.kernels.triton.linear.grouped_matmul import group_weights, grouped_matmul
from quire.kernels.triton.linear.matmul import matmul
from quire.kernels.triton.linear.skinny_matmul import skinny_matmul

# Rows, outputs, inputs, and inputs that share a scale.
SHAPES = [(1, 34, 300, 300), (3, 20, 384, 128), (16, 40, 96, 32), (9, 33, 512, 256)]


def _operands(num_rows, num_outputs, num_inputs, group, dtype):
    """x, codes, their scales [G, N], the numbers that they stand for in fp64, and a bias."""
    torch.manual_seed(num_outputs)
    codes = padded(random_codes(num_outputs, num_inputs))
    scales = torch.rand(num_inputs // group, num_outputs) * 0.01 * num_inputs**-0.5
    weight = codes.view(torch.float8_e4m3fn).double()
    weight *= scales.double().T.repeat_interleave(group, 1)
    x = surrounded(numbers(num_rows, num_inputs).to(dtype))
    return x, codes, scales, weight, numbers(num_outputs, seed=2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_scaled_codes(shape, dtype):
    x, codes, scales, weight, bias = _operands(*shape, dtype)
    assert_close(matmul(x, codes, bias, None, scales), exact(x, weight, bias))
    wide = matmul(x, codes, None, torch.float32, scales)
    assert_close(wide, exact(x, weight))
    if dtype != torch.float32:
        assert_close(skinny_matmul(x, codes, bias, scales=scales), exact(x, weight, bias))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gated_product_rounds_as_the_gate_behind_a_plain_one(shape):
    num_rows, num_outputs, *sizes = shape
    x, codes, scales, weight, bias = _operands(num_rows, 2 * num_outputs, *sizes, torch.bfloat16)
    found = skinny_matmul(x, codes, bias, scales=scales, gated=True)
    gate_up = exact(x, weight, bias).to(torch.bfloat16)
    # Where a sum lies between two numbers of the dtype, fp32 and fp64 may round it apart.
    step = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found, gated(gate_up, Gating()), rtol=step, atol=step / 4)


@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 1600), (torch.float32, 320)])
def test_a_row_has_the_same_bits_in_any_batch(dtype, group, monkeypatch):
    x, codes, scales, _, bias = _operands(70, 30, 1600, group, dtype)
    whole = matmul(x, codes, bias, None, scales)
    for rows in (slice(0, 1), slice(3, 67)):
        assert torch.equal(matmul(x[rows], codes, bias, None, scales), whole[rows])
    # A slice of K that has no program of its own is added in the same order.
    monkeypatch.setattr(module, "slices_of", lambda num_outputs, num_inputs: 3)
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)
    assert torch.equal(matmul(x, codes, bias, None, scales), whole)


@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 64), (torch.float32, 192)])
def test_experts_are_multiplied_at_once(dtype, group):
    x, *_ = _operands(20, 1, 192, group, dtype)
    codes, scales, weights = zip(
        *(_operands(1, outputs, 192, group, dtype)[1:4] for outputs in (70, 70)), strict=True
    )
    biases = [numbers(70, seed=expert).to(dtype) for expert in (0, 1)]
    ids = (numbers(20, 1, seed=9) > 0).long()
    plan = plan_groups(ids, 2)
    experts = group_weights([each.clone() for each in codes], biases, scales)
    found = grouped_matmul(x, experts, plan, pairs_per_row=1)
    for place, token in enumerate(plan.order.tolist()):
        expert = int(ids[token, 0])
        assert_close(found[place], exact(x[token], weights[expert], biases[expert]))


def test_rows_come_back_with_one_rounding():
    _, codes, scales, weight, _ = _operands(1, 9, 1056, 32, torch.bfloat16)
    rows = torch.tensor([8, 0, 8])
    found = unpack_float8_rows(codes, scales, rows, torch.float32)
    assert torch.equal(found, weight[rows].float())
    short = unpack_float8_rows(codes, scales, range(2, 7), torch.bfloat16)
    assert torch.equal(short, weight[2:7].float().bfloat16())
    assert unpack_float8_rows(codes, scales, range(3, 3), torch.bfloat16).shape == (0, 1056)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 96)}, "weight is torch.float32 and scales torch.float32, but"),
        (
            {"scales": torch.ones(3, 5)},
            r"scales are \(3, 5\), but must be \[G, 4\], contiguous",
        ),
        ({"scales": torch.ones(5, 4)}, "for G equal groups of 96 inputs"),
        ({"scales": torch.ones(6, 4)}, "a group has 16 inputs, but must have a multiple of 32"),
    ],
)
def test_wrong_scales_are_named(change, message):
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    operands = {"x": torch.zeros(2, 96), "weight": codes, "scales": torch.ones(3, 4)}
    with pytest.raises(ValueError, match=message):
        matmul(**(operands | change))


def test_experts_with_other_groups_are_refused():
    codes = [torch.zeros(4, 64, dtype=torch.uint8)] * 2
    with pytest.raises(ValueError, match=r"experts have \[1, 2\] groups, but must have the same"):
        group_weights(codes, None, [torch.ones(1, 4), torch.ones(2, 4)])
