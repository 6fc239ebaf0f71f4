"""The simulated roundings change what they should, and put it back."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.quality.rounding import (
    ACTIVATIONS,
    WEIGHTS,
    linear_inputs,
    round_groups,
    rounded_activations,
    rounded_weights,
)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = torch.nn.Linear(128, 192), torch.nn.Linear(192, 8)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def typical_inputs(seed: int) -> torch.Tensor:
    """200 inputs near a few directions, as those of real linears are."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(12, 128, generator=torch.Generator().manual_seed(1))
    return torch.randn(200, 12, generator=generator) @ directions


def test_a_smaller_group_rounds_less() -> None:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(2))
    errors = [(round_groups(x, size) - x).square().mean().item() for size in (32, 128, 256)]
    assert 0.0 < errors[0] < errors[1] < errors[2]


def assert_rounded_within(
    roundings: Mapping[str, Any],
    context: Callable[[torch.nn.Module, Any], AbstractContextManager[None]],
    model: torch.nn.Module,
) -> dict[str, float]:
    """The error of each rounding. The model is changed by it within the context alone."""
    x = typical_inputs(2)
    exact, errors = model(x), {}
    for name, rounding in roundings.items():
        with context(model, rounding):
            errors[name] = float((model(x) - exact).norm() / exact.norm())
        assert torch.equal(model(x), exact)
    assert all(0.0 < error < 0.3 for error in errors.values())
    return errors


def test_activations_are_rounded_within_the_context_alone(model: torch.nn.Module) -> None:
    assert_rounded_within(ACTIVATIONS, rounded_activations, model)


def test_weights_are_rounded_within_the_context_alone(model: torch.nn.Module) -> None:
    inputs = linear_inputs(model, typical_inputs(3))
    assert {name: x.shape for name, x in inputs.items()} == {"0": (200, 128), "1": (200, 192)}
    of_inputs = partial(rounded_weights, inputs=inputs)
    errors = assert_rounded_within(WEIGHTS, of_inputs, model)
    for name in ("weights int8", "weights int4"):
        assert errors[f"{name}, compensated"] < 0.9 * errors[name]
