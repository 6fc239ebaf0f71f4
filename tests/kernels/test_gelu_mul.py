"""The gate: bitwise equal to transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from quire.kernels.gelu_mul import gelu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
def test_equals_transformers_to_the_bit(name, approximate, dtype):
    gate_up = (torch.randn((7, 160), generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(gelu_mul(gate_up, approximate), ACT2FN[name](gate) * up)
    assert torch.equal(gate_up, before)


def test_an_odd_size_is_named():
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\).*must be even"):
        gelu_mul(torch.zeros(2, 5), "tanh")
