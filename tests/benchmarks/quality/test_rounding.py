"""The simulated roundings change what they should, and put it back."""

import pytest
import torch
from benchmarks.quality.rounding import (
    ACTIVATIONS,
    WEIGHTS,
    round_groups,
    rounded_activations,
    rounded_weights,
)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(128, 96), torch.nn.Linear(96, 8))


def test_a_smaller_group_rounds_less() -> None:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(2))
    errors = [(round_groups(x, size) - x).square().mean().item() for size in (32, 128, 256)]
    assert 0.0 < errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("context", [rounded_activations, rounded_weights])
def test_the_model_is_rounded_within_the_context_alone(context, model) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    exact = model(x)
    roundings = ACTIVATIONS if context is rounded_activations else WEIGHTS
    for rounding in roundings.values():
        with context(model, rounding):
            error = (model(x) - exact).norm() / exact.norm()
        assert 0.0 < error < 0.3
        assert torch.equal(model(x), exact)
