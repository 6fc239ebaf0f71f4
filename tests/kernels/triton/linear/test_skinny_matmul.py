"""The product for few rows in the interpreter, plain and gated."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import (
    SHORT_DTYPES,
    assert_close,
    exact,
    numbers,
    padded,
    surrounded,
)

from quire.kernels.activations import Gating, gated
from quire.kernels.triton.linear import skinny_matmul as module
from quire.kernels.triton.linear.skinny_matmul import MAX_ROWS, skinny_matmul
from quire.kernels.triton.rms_norm import add_rms_norm, rms_norm
from quire.kernels.unnormed_rows import UnnormedRows

SHAPES = [(1, 1, 16), (3, 34, 300), (8, 20, 256), (9, 40, 130), (16, 100, 512)]


def _operands(num_rows, num_outputs, num_inputs, dtype=torch.bfloat16):
    x = numbers(num_rows, num_inputs).to(dtype)
    weight = (numbers(num_outputs, num_inputs, seed=1) * num_inputs**-0.5).to(dtype)
    return surrounded(x), padded(weight), numbers(num_outputs, seed=2).to(dtype)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, dtype):
    x, weight, bias = _operands(*shape, dtype)
    assert_close(skinny_matmul(x, weight, bias), exact(x, weight, bias))
    wide = skinny_matmul(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide, exact(x, weight))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("shape", [(1, 2, 16), (3, 68, 300), (16, 40, 256)])
def test_a_gated_product_rounds_as_the_gate_behind_a_plain_one(shape, dtype, with_bias):
    x, weight, bias = _operands(*shape, dtype)
    found = skinny_matmul(x, weight, bias if with_bias else None, gated=True)
    gate_up = exact(x, weight, bias if with_bias else None).to(dtype)
    # Where a sum lies between two numbers of the dtype, fp32 and fp64 may round it apart.
    step = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, gated(gate_up, Gating()), rtol=step, atol=step / 4)


def test_a_wide_weight_takes_other_tiles():
    x, weight, bias = _operands(2, 32 * 128, 16)
    assert_close(skinny_matmul(x, weight, bias), exact(x, weight, bias))


def test_a_row_has_the_same_bits_in_any_batch_that_is_served():
    x, weight, bias = _operands(MAX_ROWS, 50, 400)
    whole = skinny_matmul(x, weight, bias)
    for rows in (slice(0, 1), slice(5, 13), slice(2, 16)):
        assert torch.equal(skinny_matmul(x[rows], weight, bias), whole[rows]), rows


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("scale", [None, 1.0, 0.22])
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_row_is_normed_as_by_the_separate_kernels_to_the_bit(
    is_wide, scale, offset, dtype, monkeypatch
):
    """Without a residual stream (scale None), with one, and with a factor; tiles of both widths."""
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1 if is_wide else 128)
    num_inputs = 300
    x, weight, bias = _operands(1, 68, num_inputs, dtype)
    residual, norm = (
        numbers(*shape, seed=3).to(dtype) for shape in ((1, num_inputs), (num_inputs,))
    )
    if scale is None:
        total, rows = None, UnnormedRows(x, None, None, 1.0, norm, 1e-6, offset)
        normed = rms_norm(x, norm, 1e-6, offset)
    else:
        total = torch.full_like(residual, torch.nan)
        rows = UnnormedRows(x, residual.clone(), total, scale, norm, 1e-6, offset)
        normed, expected_total = add_rms_norm(x.clone(), residual, norm, 1e-6, offset, scale)
    for is_gated in (False, True):
        expected = skinny_matmul(normed, weight, bias, gated=is_gated)
        assert torch.equal(skinny_matmul(rows, weight, bias, gated=is_gated), expected)
        assert total is None or torch.equal(total, expected_total)


def test_unnormed_rows_that_are_not_served_are_refused():
    x, weight, _ = _operands(2, 20, 32)
    norm = torch.ones(32, dtype=x.dtype)
    with pytest.raises(ValueError, match=r"x is \(2, 32\), but a row that is normed must be alone"):
        skinny_matmul(UnnormedRows(x, None, None, 1.0, norm, 1e-6, None), weight)
    x, residual = x[:1], x[1:].clone()
    with pytest.raises(ValueError, match="total must be memory of its own"):
        skinny_matmul(UnnormedRows(x, residual, residual, 1.0, norm, 1e-6, None), weight)
    with pytest.raises(ValueError, match="a residual needs a total"):
        skinny_matmul(UnnormedRows(x, residual, None, 1.0, norm, 1e-6, None), weight)
    with pytest.raises(ValueError, match=r"norm is \(16,\), but must have 32 elements"):
        skinny_matmul(UnnormedRows(x, None, None, 1.0, norm[:16], 1e-6, None), weight)


def test_any_leading_dimensions():
    x, weight, _ = _operands(6, 20, 32)
    whole = skinny_matmul(x, weight)
    assert torch.equal(skinny_matmul(x.reshape(2, 3, 32), weight), whole.view(2, 3, 20))
    assert torch.equal(skinny_matmul(x[0], weight), whole[0])
    assert skinny_matmul(x[:0], weight).shape == (0, 20)
    assert skinny_matmul(x[:0], weight, gated=True).shape == (0, 10)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "options", "message"),
    [
        (17, 20, {}, "x has 17 rows, but must have at most 16"),
        (2, 21, {"gated": True}, "a gated linear needs an even number of outputs, not 21"),
        (2, 20, {"gated": True, "out_dtype": torch.float32}, "its result, not torch.float32"),
    ],
)
def test_errors_name_unsupported_arguments(num_rows, num_outputs, options, message):
    x, weight, _ = _operands(num_rows, num_outputs, 32)
    with pytest.raises(ValueError, match=message):
        skinny_matmul(x, weight, **options)


def test_a_wide_dtype_is_named():
    x, weight, _ = _operands(2, 20, 32, torch.float32)
    with pytest.raises(ValueError, match=r"x is torch\.float32, but must be one of"):
        skinny_matmul(x, weight)
