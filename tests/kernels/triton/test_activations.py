"""Activations and gates in the interpreter: as torch's up to the last bits of exponentials."""

import pytest
import torch
from tests.pairwise import pairwise

pytest.importorskip("triton")

from quire.kernels import activations as reference
from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.triton.activations import activate, gate, gated, soft_cap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = list(ActivationFunction)
SHAPES = [(1, 2), (3, 34), (2, 2, 1026), (0, 16)]
GATINGS = [
    *map(Gating, FUNCTIONS),
    Gating(limit=7.0, alpha=1.702, up_offset=1.0),
    Gating(ActivationFunction.GELU, limit=1.3),
]


def _random(*shape, dtype, seed=1):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def _close(found, expected, atol=2e-6):
    # A function to a few ulps, or in a short dtype one step of each rounding. Near zero torch's
    # gelu adds numbers that all but cancel.
    tolerance = (
        16 * 2**-23 if expected.dtype == torch.float32 else 4 * torch.finfo(expected.dtype).eps
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=atol)


@pairwise()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.value)
def test_activations_equal_torch(function, shape, dtype):
    x = _random(*shape, dtype=dtype)
    before = x.clone()
    _close(activate(x, function), reference.activate(x, function))
    assert torch.equal(x, before)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.value)
def test_far_numbers(function):
    far = torch.tensor([-torch.inf, -300.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 300.0, torch.nan])[1:]
    expected = reference.activate(far, function)
    torch.testing.assert_close(
        activate(far, function), expected, rtol=1e-6, atol=1e-7, equal_nan=True
    )


@pairwise()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gating", GATINGS, ids=str)
def test_gated_products_equal_torch(gating, shape, dtype):
    x = _random(*shape, dtype=dtype)
    _close(gated(x, gating), reference.gated(x, gating), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_one", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS[::2], ids=lambda function: function.value)
def test_gates_by_another_value_equal_torch(function, by_one, dtype):
    for shape in SHAPES:
        x, by = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=2)
        by = by[..., :1] if by_one else by
        _close(gate(x, by, function), reference.gate(x, by, function))


def test_heads_that_lie_apart():
    product = _random(5, 3, 48, dtype=torch.float32)
    x, by = product[..., :24], product[..., 24:]
    for given in (by, by[..., :1]):
        found = gate(x, given, ActivationFunction.SIGMOID)
        _close(found, reference.gate(x, given, ActivationFunction.SIGMOID))
        assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [1.5, 30.0])
def test_a_soft_cap_equals_torch(cap, dtype):
    for factor in (1e-3, 0.1, 1.0, 10.0):
        x = _random(3, 1030, dtype=dtype) * factor
        _close(soft_cap(x, cap), reference.soft_cap(x, cap))


def test_shapes_that_do_not_fit_are_named():
    x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\), but its last dimension must be"):
        gated(x, Gating())
    with pytest.raises(ValueError, match=r"by is \(2, 3\), but must have x's shape, \(2, 5\)"):
        gate(x, x[:, :3], ActivationFunction.SILU)
    with pytest.raises(ValueError, match=r"by is torch\.float64"):
        gate(x, x.double(), ActivationFunction.SILU)
