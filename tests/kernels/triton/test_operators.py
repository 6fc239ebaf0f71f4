"""The operators of a GPU: those of torch, on whole models too."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.triton.operators import TritonOperators
from quire.layers.norm import RMSNorm
from quire.layers.operator_module import use_operators


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_is_as_torch_defines_it():
    operators: Operators = TritonOperators()
    x, residual, weight = _random(3, 5, 48), _random(3, 5, 48, seed=1), _random(48, seed=2)
    close = torch.testing.assert_close
    close(operators.rms_norm(x, weight, 1e-5), TORCH_OPERATORS.rms_norm(x, weight, 1e-5))
    close(operators.gated(x, Gating()), TORCH_OPERATORS.gated(x, Gating()))
    close(operators.rms_norm(x, None, 1e-5), TORCH_OPERATORS.rms_norm(x, None, 1e-5))
    gating, sigmoid = Gating(ActivationFunction.GELU), ActivationFunction.SIGMOID
    close(operators.gated(x, gating), TORCH_OPERATORS.gated(x, gating))
    close(operators.gate(x, residual, sigmoid), TORCH_OPERATORS.gate(x, residual, sigmoid))
    close(operators.activate(x, sigmoid), TORCH_OPERATORS.activate(x, sigmoid))
    close(operators.soft_cap(x, 2.0), TORCH_OPERATORS.soft_cap(x, 2.0))
    normed = TORCH_OPERATORS.layer_norm(x, weight, weight, 1e-5)
    close(operators.layer_norm(x, weight, weight, 1e-5), normed)
    expected = TORCH_OPERATORS.add_rms_norm(x, residual, weight, 1e-5)
    close(operators.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected)


def test_a_model_is_given_them_from_outside():
    norm = RMSNorm(48, 1e-5, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.data = _random(48)
    x = _random(2, 48, seed=1)
    expected = norm(x)
    use_operators(norm, TritonOperators())
    assert isinstance(norm.operators, TritonOperators)
    torch.testing.assert_close(norm(x), expected)
