"""The product for any number of rows in the interpreter: its numbers, and that a row has the same
bits whatever the batch, the tile and who goes over its slices."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, assert_close, exact, numbers, padded, surrounded

from quire.kernels.triton.linear import matmul as module
from quire.kernels.triton.linear.matmul import matmul, slices_of


def _operands(num_rows, num_outputs, num_inputs, dtype=torch.bfloat16):
    x = numbers(num_rows, num_inputs).to(dtype)
    weight = (numbers(num_outputs, num_inputs, seed=1) * num_inputs**-0.5).to(dtype)
    return surrounded(x), padded(weight), numbers(num_outputs, seed=2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 130, 64), (70, 40, 100), (130, 129, 50)])
def test_equals_torch(shape, dtype):
    x, weight, bias = _operands(*shape, dtype)
    assert_close(matmul(x, weight, bias), exact(x, weight, bias))
    wide = matmul(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide, exact(x, weight))


def test_any_leading_dimensions():
    x, weight, _ = _operands(6, 20, 32)
    whole = matmul(x, weight)
    assert torch.equal(matmul(x.reshape(2, 3, 32), weight), whole.view(2, 3, 20))
    assert torch.equal(matmul(x[0], weight), whole[0])
    assert matmul(x[:0], weight).shape == (0, 20)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*(((140, 70), dtype) for dtype in DTYPES), ((20, 1030), torch.bfloat16)]
)
def test_a_row_has_the_same_bits_in_any_batch(shape, dtype):
    x, weight, bias = _operands(131, *shape, dtype)
    whole = matmul(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 67), slice(60, 125)):
        assert torch.equal(matmul(x[rows], weight, bias), whole[rows]), rows
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(matmul(other, weight, bias)[0], whole[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_programs_over_slices_changes_no_bit(dtype, monkeypatch):
    x, weight, bias = _operands(5, 30, 1600, dtype)
    assert slices_of(30, 1600) == 3
    by_three = matmul(x, weight, bias)
    assert_close(by_three, exact(x, weight, bias))
    monkeypatch.setattr(module, "slices_of", lambda num_outputs, num_inputs: 3)
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)
    assert torch.equal(matmul(x, weight, bias), by_three)
    monkeypatch.setattr(module, "slices_of", lambda num_outputs, num_inputs: 1)
    if dtype == torch.float32:  # in the others too few bits are left to see it
        assert not torch.equal(matmul(x, weight, bias), by_three)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "expected"),
    [
        (4096, 4096, 4),
        (6144, 4096, 3),
        (28672, 4096, 1),
        (4096, 14336, 4),
        (128256, 4096, 1),
        (1024, 2048, 4),
        (100, 100, 1),
    ],
)
def test_slices_make_programs_enough_for_a_device(num_outputs, num_inputs, expected):
    assert slices_of(num_outputs, num_inputs) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 31)}, r"x is \(2, 31\), but weight needs \[\.\.\., 32\]"),
        ({"x": torch.zeros(2, 32).half()}, "x is torch.float16 on cpu, but must be as weight"),
        ({"weight": torch.zeros(32, 20).T}, "weight is .* but must be .* contiguous"),
        ({"weight": torch.zeros(32)}, r"weight is \(32,\), but must be \[N, K\]"),
        ({"bias": torch.zeros(21)}, r"bias is \(21,\), but must be \[20\]"),
        ({"bias": torch.zeros(20).double()}, "bias is torch.float64 .* but must be as x"),
    ],
)
def test_wrong_operands_are_named(change, message):
    operands = {"x": torch.zeros(2, 32), "weight": torch.zeros(20, 32), "bias": None}
    with pytest.raises(ValueError, match=message):
        matmul(**(operands | change))
