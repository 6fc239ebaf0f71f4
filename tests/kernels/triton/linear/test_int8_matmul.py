"""Products of int8 in the interpreter: those of the torch methods to the bit."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, numbers
from tests.pairwise import pairwise

from quire.kernels.activations import Gating, gated
from quire.kernels.quantize import (
    INT8_GROUP,
    multiply_add,
    quantize_groups,
    quantize_int8,
    quantize_int8_weight,
    rotate_blocks,
    rotation_size,
)
from quire.kernels.triton.linear.grouped_int8_matmul import group_int8_weights
from quire.kernels.triton.linear.int8_matmul import MAX_INPUTS, Int8Weight, int8_matmul

SHAPES = [(1, 3, 20), (8, 40, 100), (9, 50, 513), (17, 70, 192), (65, 131, 260)]


def _weight(num_outputs, num_inputs, dtype, *, is_rotated=True):
    quantize = quantize_int8_weight if is_rotated else quantize_int8
    levels, scales = quantize(numbers(num_outputs, num_inputs, seed=1))
    return Int8Weight(levels, scales, numbers(num_outputs, seed=2).to(dtype), is_rotated)


def _reference(x, weight):
    """fp32."""
    if not weight.is_rotated:
        q, scales = quantize_int8(x)
        dots = (q.int() @ weight.levels.int().T).float()
        return dots * scales[:, None] * weight.scales + weight.bias.float()
    q, scales = quantize_groups(rotate_blocks(x, rotation_size(x.shape[1])), INT8_GROUP)
    sums = torch.zeros(len(x), len(weight.levels))
    for group, levels in enumerate(weight.levels.split(INT8_GROUP, dim=1)):
        dots = q[:, group, : levels.shape[1]] @ levels.float().T
        sums = multiply_add(dots, scales[:, group, None], sums)
    return sums * weight.scales + weight.bias.float()


def _with_outliers(x):
    """Inputs a hundred times the others, so that groups have scales far apart."""
    x[:, 7::150] *= 100
    return x


@pairwise()
@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_to_the_bit(shape, dtype, is_rotated):
    num_rows, num_outputs, num_inputs = shape
    x = _with_outliers(numbers(num_rows, num_inputs)).to(dtype)
    weight = _weight(num_outputs, num_inputs, dtype, is_rotated=is_rotated)
    expected = _reference(x, weight)
    assert torch.equal(int8_matmul(x, weight, out_dtype=torch.float32), expected)
    assert torch.equal(int8_matmul(x, weight), expected.to(dtype))


@pytest.mark.parametrize("is_rotated", [True, False])
def test_the_largest_integers_do_not_overflow(is_rotated):
    num_inputs = 2048
    levels = torch.full((32, num_inputs), 127, dtype=torch.int8)
    weight = Int8Weight(levels, torch.ones(32), None, is_rotated)
    x = torch.zeros(2, num_inputs)
    # Rotated, all of a block of 64 inputs are as the first one.
    x[:, :: 64 if is_rotated else 1] = -127.0
    assert torch.equal(int8_matmul(x, weight), torch.full((2, 32), -127.0 * 127 * num_inputs))


@pytest.mark.parametrize("num_rows", [1, 17])
def test_an_infinity_makes_its_row_nan_and_no_other(num_rows):
    x, weight = numbers(num_rows + 1, 300), _weight(20, 300, torch.float32)
    x[0, 290] = torch.inf
    found = int8_matmul(x, weight)
    assert found[0].isnan().all() and found[1:].isfinite().all()


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6, 20), (9, 68, 300)])
def test_a_gated_product_is_the_gate_behind_a_plain_one(shape, dtype, is_rotated):
    num_rows, num_outputs, num_inputs = shape
    x = numbers(num_rows, num_inputs).to(dtype)
    weight = _weight(num_outputs, num_inputs, dtype, is_rotated=is_rotated)
    found = int8_matmul(x, weight, gated=True)
    # The exponential's last bits, which may turn a rounding.
    step = max(torch.finfo(dtype).eps, 2**-20)
    torch.testing.assert_close(found, gated(int8_matmul(x, weight), Gating()), rtol=step, atol=1e-6)


def test_any_leading_dimensions():
    x, weight = numbers(6, 32), _weight(20, 32, torch.float32)
    whole = int8_matmul(x, weight)
    assert torch.equal(int8_matmul(x.view(2, 3, 32), weight), whole.view(2, 3, 20))
    assert int8_matmul(x[:0], weight).shape == (0, 20)


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "options", "message"),
    [
        (2, 31, {}, r"x is \(2, 31\), but weight needs \[\.\.\., 32\]"),
        (17, 32, {"gated": True}, "x has 17 rows, but a gated product may have at most 16"),
    ],
)
def test_errors_name_unsupported_arguments(num_rows, num_inputs, options, message):
    with pytest.raises(ValueError, match=message):
        int8_matmul(torch.zeros(num_rows, num_inputs), _weight(20, 32, torch.float32), **options)


def test_a_sum_that_might_overflow_is_refused():
    size = MAX_INPUTS + 1
    levels = torch.zeros(1, size, dtype=torch.int8)
    weight = Int8Weight(levels, torch.ones(1), None, is_rotated=False)
    with pytest.raises(ValueError, match=f"at most {MAX_INPUTS}"):
        int8_matmul(torch.zeros(1, size), weight)
    with pytest.raises(ValueError, match=f"at most {MAX_INPUTS}"):
        group_int8_weights([levels], [torch.ones(1)], None, is_rotated=False)


def test_the_largest_sum_of_a_row_is_exact():
    levels = torch.full((1, MAX_INPUTS), -128, dtype=torch.int8)
    weight = Int8Weight(levels, torch.ones(1), None, is_rotated=False)
    found = int8_matmul(torch.full((1, MAX_INPUTS), 127.0), weight)
    assert found.item() == torch.tensor(-127.0 * 128 * MAX_INPUTS).item()
    assert 127 * 128 * (MAX_INPUTS + 1) > 2**31 - 1


def test_a_rotated_weight_has_any_number_of_inputs():
    size = MAX_INPUTS + 64 - MAX_INPUTS % 64
    weight, x = _weight(3, size, torch.float32), numbers(2, size)
    assert size > MAX_INPUTS and torch.equal(int8_matmul(x, weight), _reference(x, weight))
    group_int8_weights([weight.levels], [weight.scales], None)
