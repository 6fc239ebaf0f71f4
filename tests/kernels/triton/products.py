"""Operands and bounds for the tests of matrix products."""

import torch

SHORT_DTYPES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *SHORT_DTYPES]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] as part of a larger tensor that is NaN elsewhere: what is read beside it is seen."""
    around = torch.full((x.shape[0] + 2, x.shape[1] + 48), torch.nan, dtype=x.dtype)
    inside = around[1:-1, 16:-32]
    inside.copy_(x)
    return inside


def padded(weight: torch.Tensor) -> torch.Tensor:
    """A contiguous weight with NaN, or large codes, before and behind it in memory."""
    beside = torch.nan if weight.is_floating_point() else 0x7E
    around = torch.full((weight.numel() + 512,), beside, dtype=weight.dtype)
    inside = around[256:-256].view(weight.shape)
    inside.copy_(weight)
    return inside


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to fp32 sums of some hundred products of normal numbers, and a rounding of the
    result to its dtype."""
    step = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=step, atol=1e-4)
