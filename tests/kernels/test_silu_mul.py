"""The gate: bitwise equal to transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from quire.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 160), (48, 3, 34), (0, 8)])
def test_equals_transformers_to_the_bit(shape, dtype):
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(silu_mul(gate_up), ACT2FN["silu"](gate) * up)
    assert torch.equal(gate_up, before)


def test_the_gate_comes_first():
    gate_up = torch.tensor([[0.0, 100.0, 3.0, 5.0]])
    assert silu_mul(gate_up).tolist() == [[0.0, 500.0]]


def test_an_odd_size_is_named():
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\).*must be even"):
        silu_mul(torch.zeros(2, 5))
