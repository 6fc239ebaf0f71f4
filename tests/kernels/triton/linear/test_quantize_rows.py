"""Activations as int8 in the interpreter: the numbers of `kernels.quantize`, to the bit."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.products import DTYPES, numbers, surrounded

from quire.kernels.quantize import quantize_int8
from quire.kernels.triton.linear import quantize_rows as module
from quire.kernels.triton.linear.quantize_rows import quantize_rows


def _assert_as_reference(x, multiple=16):
    found = quantize_rows(x, multiple)
    q, scales = quantize_int8(x)
    assert torch.equal(found.q[:, : x.shape[1]], q)
    assert not found.q[:, x.shape[1] :].any()
    torch.testing.assert_close(found.scales, scales, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 100), (2, 4096), (3, 4500)])
def test_equals_the_reference_to_the_bit(shape, dtype):
    x = surrounded((numbers(*shape) * 3).to(dtype))
    _assert_as_reference(x)


def test_halves_go_to_the_even_neighbour():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert _assert_as_reference(x).q[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -126]


def test_rows_of_zeros_and_what_is_no_number(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 32)
    x = numbers(6, 70)
    x[0] = 0
    x[1] *= 1e-33
    x[2, 69] = torch.nan
    x[3, 1] = torch.inf
    x[4, 40] = -torch.inf
    found = _assert_as_reference(x)
    assert not found.q[:5].any() and found.q[5].any()
    assert found.scales.isnan().tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("block", [64, 4096])
def test_padding(block, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", block)
    assert _assert_as_reference(numbers(4, 300), multiple=256).q.shape == (4, 512)


def test_no_rows():
    found = quantize_rows(torch.zeros(0, 30), 16)
    assert found.q.shape == (0, 32) and found.scales.shape == (0,)
