"""RMSNorm: bitwise equal to transformers' own, over odd shapes and dtypes."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.rms_norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (7, 80), (48, 3, 17), (0, 64), (5, 1), (33, 1013)]
EPS = 1e-5


def _random(*shape, dtype):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * 3).to(dtype)


def _transformers(x, weight):
    norm = LlamaRMSNorm(x.shape[-1], eps=EPS)
    norm.weight.data = weight
    with torch.no_grad():
        return norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers_to_the_bit(shape, dtype):
    x, weight = _random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype)
    before = x.clone()
    assert torch.equal(rms_norm(x, weight, EPS), _transformers(x, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_to_the_residual_stream_in_its_dtype(shape, dtype):
    x, weight = _random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype)
    residual = _random(1, *shape, dtype=dtype)[0]
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, _transformers(residual + x, weight))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_a_strided_view_has_the_same_norm():
    x, weight = _random(9, 4, 32, dtype=torch.float32), _random(32, dtype=torch.float32)
    assert torch.equal(rms_norm(x[:, 1:3], weight, EPS), rms_norm(x, weight, EPS)[:, 1:3])


def test_zeros_stay_zeros():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(1, 8), torch.ones(8).bfloat16()])
def test_a_weight_that_does_not_fit_is_named(weight):
    with pytest.raises(ValueError, match=r"weight is .* needs \(8,\) torch.float32"):
        rms_norm(torch.zeros(2, 8), weight, EPS)


@pytest.mark.parametrize("residual", [torch.zeros(1, 8), torch.zeros(2, 8).bfloat16()])
def test_a_residual_that_does_not_fit_is_named(residual):
    with pytest.raises(ValueError, match=r"residual is .* must be like x"):
        add_rms_norm(torch.zeros(2, 8), residual, torch.ones(8), EPS)
