"""The gates of Gated DeltaNet: equal to transformers' formula, and refused shapes."""

import pytest
import torch
from torch.nn import functional

from quire.kernels.delta_gates import delta_gates


def random(*shape, dtype):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_formula_of_transformers(dtype):
    a, b = random(2, 8, 8, dtype=dtype).unbind()
    a_log, dt_bias = random(2, 8, dtype=dtype).unbind()
    g, beta = delta_gates(a, b, a_log, dt_bias)
    # `Qwen3_5GatedDeltaNet.forward`
    assert torch.equal(g, -a_log.float().exp() * functional.softplus(a.float() + dt_bias))
    assert torch.equal(beta, b.sigmoid().float())
    assert g.dtype == beta.dtype == torch.float32


def test_refuses_other_numbers_of_heads():
    a = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"dt_bias \(5,\)"):
        delta_gates(a, a, torch.zeros(4), torch.zeros(5))
