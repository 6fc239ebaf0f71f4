"""Products of four bits in the interpreter: those of the torch method to the bit."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, numbers

from quire.formats.int4 import Int4TorchMethod
from quire.kernels.quantize import Int4Rows, quantize_int4, quantize_int8, split_wide
from quire.kernels.triton.linear import int4_matmul as module
from quire.kernels.triton.linear.int4_matmul import Int4Weight, WideInputs, int4_matmul
from quire.layers.linear import Linear, LinearKind

CPU = torch.device("cpu")


def _packed(rows, bias=None, wide=None):
    return Int4Weight(
        module.pack_levels(rows).contiguous(),
        module.pack_scales(rows).contiguous(),
        module.pack_offsets(rows).contiguous(),
        rows.scale_factors,
        rows.offset_factors,
        bias,
        wide,
    )


def _both(num_outputs, num_inputs, dtype, *, has_wide=False):
    """A weight for the kernel, and the same as a linear of torch."""
    numbers_of_weight, bias = numbers(num_outputs, num_inputs, seed=1), numbers(num_outputs, seed=2)
    linear = Linear(
        num_inputs, (num_outputs,), LinearKind.REPLICATED, bias=True, dtype=dtype, device=CPU
    )
    linear.use(Int4TorchMethod(32, has_wide=has_wide), dtype, CPU)
    wide, rest = None, numbers_of_weight
    if has_wide:
        numbers_of_weight[:, 3::70] *= 50
        linear.method.take_sample(linear, numbers_of_weight)
        inputs = linear.get_parameter("wide_inputs")
        wide_numbers, rest = split_wide(numbers_of_weight, inputs)
        wide = WideInputs(inputs, *quantize_int8(wide_numbers))
    linear.slots()["weight", 0].load(0, numbers_of_weight)
    linear.slots()["bias", 0].load(0, bias)
    return _packed(quantize_int4(rest, 32), bias.to(dtype), wide), linear


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3, 20), torch.float32),
        ((9, 50, 530), torch.float32),
        ((33, 70, 300), torch.bfloat16),
        ((8, 20, 256), torch.bfloat16),
        ((2, 16, 40), torch.float16),
        ((3, 20, 288), torch.float32),
    ],
)
@pytest.mark.parametrize("has_wide", [False, True])
def test_equals_torch_to_the_bit(shape, dtype, has_wide):
    num_rows, num_outputs, num_inputs = shape
    weight, linear = _both(num_outputs, num_inputs, dtype, has_wide=has_wide and num_inputs >= 256)
    x = numbers(num_rows, num_inputs)
    x[:, 7::150] *= 100  # scales of pairs are far apart
    x = x.to(dtype)
    assert torch.equal(int4_matmul(x, weight), linear(x))
    wide = linear.method.apply(linear, x, torch.float32)
    assert torch.equal(int4_matmul(x, weight, torch.float32), wide)


def test_the_largest_integers_are_exact():
    """Levels, scales and offsets all at their ends: sums stay whole where they are to."""
    groups = 16
    rows = Int4Rows(
        torch.full((16, groups, 32), 15, dtype=torch.uint8),
        torch.full((16, groups), 255, dtype=torch.uint8),
        torch.full((16, groups), 255, dtype=torch.uint8),
        torch.zeros(16),
        torch.ones(16),
    )
    x = torch.full((1, groups * 32), -127.0)
    expected = 255.0 * 127 * 32 * groups
    assert int4_matmul(x, _packed(rows)).tolist() == [[expected] * 16]


def test_every_level_scale_and_offset_finds_its_input():
    """One input at a time: q s - o of its group, by factors that keep the two apart."""
    generator = torch.Generator().manual_seed(3)
    rows = Int4Rows(
        torch.randint(0, 16, (3, 11, 32), generator=generator).byte(),
        torch.randint(0, 256, (3, 11), generator=generator).byte(),
        torch.randint(0, 256, (3, 11), generator=generator).byte(),
        torch.ones(3),
        torch.full((3,), 0.5),
    )
    x = torch.zeros(len(range(0, 352, 13)), 352)
    for row, place in enumerate(range(0, 352, 13)):
        x[row, place] = 127.0
    expected = 127 * rows.dequantized().flatten(1)[:, ::13].T
    assert torch.equal(int4_matmul(x, _packed(rows)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    weight, _ = _both(40, 300, dtype)
    x = numbers(34, 300).to(dtype)
    whole = int4_matmul(x, weight)
    for rows in (slice(0, 1), slice(2, 11), slice(20, 34)):
        assert torch.equal(int4_matmul(x[rows], weight), whole[rows]), rows


@pytest.mark.parametrize("has_wide", [False, True])
def test_any_leading_dimensions(has_wide):
    weight, _ = _both(20, 256, torch.float32, has_wide=has_wide)
    x = numbers(6, 256)
    whole = int4_matmul(x, weight)
    assert torch.equal(int4_matmul(x.view(2, 3, 256), weight), whole.view(2, 3, 20))
    assert int4_matmul(x[:0], weight).shape == (0, 20)


def test_a_wrong_size_is_named():
    weight, _ = _both(20, 64, torch.float32)
    with pytest.raises(ValueError, match=r"x is \(2, 300\), but weight has 1 stretches of 128"):
        int4_matmul(torch.zeros(2, 300), weight)
