"""The gate in the interpreter: the torch function up to the exponential's last bits."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels import activations
from quire.kernels.activations import Gating
from quire.kernels.triton.operators import TritonOperators

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 2), (3, 34), (2, 2, 2026), (0, 16), (1, 2050)]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return TritonOperators().gated(gate_up, Gating())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, dtype):
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    before = x.clone()
    # silu to a few ulps, or in a short dtype one step of its rounding, then a product.
    tolerance = 8 * 2**-23 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        silu_mul(x), activations.gated(x, Gating()), rtol=tolerance, atol=1e-7
    )
    assert torch.equal(x, before)


def test_rows_may_lie_apart():
    wide = torch.randn(4, 3, 64)
    assert torch.equal(silu_mul(wide[:, 1]), silu_mul(wide[:, 1].contiguous()))


def test_large_numbers_neither_overflow_nor_vanish():
    gate = torch.tensor([-1e30, -200.0, -80.0, 0.0, 200.0, 3e38])
    found = silu_mul(torch.cat((gate, torch.ones(6))))
    assert found[0] == 0 and found[1] == 0 and found[3] == 0
    assert -1e-32 < found[2] < 0 and found[4] == 200 and found[5] == gate[5]


def test_an_odd_size_is_named():
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\), but its last dimension must be"):
        silu_mul(torch.zeros(2, 5))
