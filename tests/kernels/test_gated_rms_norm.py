"""Norms with gates: bitwise equal to transformers' classes, and refused shapes."""

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from quire.kernels.gated_rms_norm import gated_rms_norm

# As many elements as whole vectors hold; torch computes the others otherwise.
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_each_head_before_its_gate(dtype):
    x, gate = random(2, 64, 3, 24, dtype=dtype).unbind()
    norm = Qwen3NextRMSNormGated(24, eps=1e-5).to(dtype)
    norm.weight.data = random(24, dtype=dtype)
    with torch.no_grad():
        expected = norm(x.reshape(-1, 24), gate.reshape(-1, 24)).view(x.shape)
    assert torch.equal(gated_rms_norm(x, gate, norm.weight.data, 1e-5, gates_first=False), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_each_group_behind_its_gate(dtype):
    x, gate = random(2, 1, 64, 48, dtype=dtype).unbind()
    norm = FalconH1RMSNormGated(48, eps=1e-5, n_groups=2, norm_before_gate=False).to(dtype)
    norm.weight.data = random(48, dtype=dtype)
    with torch.no_grad():
        expected = norm(x, gate)[0]
    groups = (part[0].unflatten(-1, (2, 24)) for part in (x, gate))
    weight = norm.weight.data.view(2, 24)
    found = gated_rms_norm(*groups, weight, 1e-5, gates_first=True)
    assert torch.equal(found.flatten(-2), expected)


def test_refuses_another_shape():
    x = torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match=r"gate is \(3, 8\)"):
        gated_rms_norm(x, torch.zeros(3, 8), torch.ones(4), 1e-6, gates_first=False)
