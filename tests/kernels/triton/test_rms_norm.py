"""RMSNorm in the interpreter: the torch functions up to the order of the sum of squares."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels import rms_norm as reference
from quire.kernels.triton.rms_norm import MAX_SIZE, add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (7, 80), (3, 5, 17), (0, 64), (5, 1), (3, 1013), (1, 4096), (9, 128)]
EPS = 1e-5


def _random(*shape, dtype, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_normed(found, expected):
    """Another order of the sum moves an fp32 scale by some ulps, and a rounded quotient by one;
    its product with the weight by one or two of the result's."""
    ulps = 8 if found.dtype == torch.float32 else 2
    tolerance = ulps * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, dtype):
    x, weight = _random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    assert_normed(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_to_the_residual_stream_in_its_dtype(shape, dtype):
    x, weight = _random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype, seed=1)
    residual = _random(*shape, dtype=dtype, seed=2)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_normed(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_an_offset_is_added_to_the_weight_before_anything_is_rounded(offset, dtype):
    x, weight = _random(5, 80, dtype=dtype), _random(80, dtype=dtype, seed=1)
    assert_normed(rms_norm(x, weight, EPS, offset), reference.rms_norm(x, weight, EPS, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_added_residual_may_be_scaled(dtype):
    x, weight = _random(5, 80, dtype=dtype), _random(80, dtype=dtype, seed=1)
    residual = _random(5, 80, dtype=dtype, seed=2)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS, 1.0, 0.22)
    normed, total = add_rms_norm(x, residual, weight, EPS, 1.0, 0.22)
    assert torch.equal(total, expected_total)
    assert_normed(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 1.0])
def test_a_row_has_the_same_bits_in_any_batch(offset, dtype):
    x, weight = _random(21, 80, dtype=dtype), _random(80, dtype=dtype)
    together = rms_norm(x, weight, EPS, offset)
    alone = torch.cat([rms_norm(x[row : row + 1], weight, EPS, offset) for row in range(21)])
    assert torch.equal(together, alone)


def test_heads_of_a_fused_projection_are_normed_as_they_lie():
    fused, weight = _random(5, 7, 32, dtype=torch.bfloat16), _random(32, dtype=torch.bfloat16)
    view = fused[:, 2:5]
    assert torch.equal(rms_norm(view, weight, EPS), rms_norm(view.contiguous(), weight, EPS))


def test_zeros_stay_zeros():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(1, 8), torch.ones(16)[::2]])
def test_a_weight_that_does_not_fit_is_named(weight):
    with pytest.raises(ValueError, match=r"weight is .* needs \(8,\), contiguous"):
        rms_norm(torch.zeros(2, 8), weight, EPS)


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16 on cpu, but must be as x"):
        rms_norm(torch.zeros(2, 8), torch.ones(8).bfloat16(), EPS)


@pytest.mark.parametrize("residual", [torch.zeros(1, 8), torch.zeros(2, 8).bfloat16()])
def test_a_residual_that_does_not_fit_is_named(residual):
    with pytest.raises(ValueError, match=r"residual is .* must be as x"):
        add_rms_norm(torch.zeros(2, 8), residual, torch.ones(8), EPS)


def test_rows_that_lie_apart_are_added_too():
    wide = _random(4, 3, 32, dtype=torch.float32)
    x, residual, weight = wide[:, 0], wide[:, 2], torch.ones(32)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_normed(normed, expected)


def test_a_row_that_no_program_holds_is_refused():
    size = MAX_SIZE + 1
    with pytest.raises(ValueError, match=f"last dimension may be {MAX_SIZE} at most"):
        rms_norm(torch.zeros(1, size), torch.zeros(size), EPS)
