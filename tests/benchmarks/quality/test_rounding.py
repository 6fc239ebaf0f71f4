"""The simulated roundings change what they should, and put it back."""

import pytest
import torch
from benchmarks.quality.rounding import (
    ROWS,
    bfloat16_outputs,
    linear_inputs,
    round_groups,
    rounded,
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


def test_linears_round_within_the_context_alone(model: torch.nn.Module) -> None:
    inputs = linear_inputs(model, typical_inputs(3))
    assert {name: x.shape for name, x in inputs.items()} == {"0": (200, 128), "1": (200, 192)}
    x = typical_inputs(2)
    exact, errors = model(x), {}
    for name, row in ROWS.items():
        with rounded(model, row, inputs):
            errors[name] = float((model(x) - exact).norm() / exact.norm())
        assert torch.equal(model(x), exact)
    assert all(0.0 < error < 0.3 for error in errors.values())
    for name in ("weights int8", "weights int4"):
        assert errors[f"{name}, compensated"] < 0.9 * errors[name]
    compensated = errors["weights int8, compensated"]
    assert errors["weights int8, compensated, a scale for 64"] < compensated < errors["int8"]
    assert errors["noise"] < errors["int8, scales for 32 and for 64"] < errors["int8"]


def test_modules_return_bfloat16_within_the_context_alone(model: torch.nn.Module) -> None:
    x = typical_inputs(2)
    exact = model(x)
    with bfloat16_outputs(model):
        output = model(x)
    assert torch.equal(output, output.bfloat16().float())
    assert torch.equal(model(x), exact) and not torch.equal(output, exact)
