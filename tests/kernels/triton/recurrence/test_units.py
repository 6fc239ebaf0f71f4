"""Sums of rows in their fixed order, and softplus, in the interpreter.

What layers compute of them is tested in `tests/recurrence/test_triton_states.py`.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.kernels.triton.recurrence.mamba2_scan import softplus
from quire.kernels.triton.recurrence.units import dense_tokens, sum_rows


@triton.jit
def sum_kernel_of_test(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + tl.arange(0, ROWS)[:, None] * COLUMNS + columns[None, :])
    tl.store(out_ptr + columns, sum_rows(x, ROWS, COLUMNS))


@triton.jit
def softplus_kernel_of_test(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, softplus(tl.load(x_ptr + at)))


def halved(x: torch.Tensor) -> torch.Tensor:
    """The order that is documented: the halves of the rows, until one is left."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (16, 8), (256, 2), (1024, 1)])
def test_sums_of_rows_have_their_order(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    out = torch.empty(shape[1])
    sum_kernel_of_test[(1,)](x, out, *shape)
    assert torch.equal(out, halved(x))


def test_softplus_is_good_for_small_results_too() -> None:
    """torch's own float64 is the reference; small results are exp(x)."""
    x = torch.cat([torch.linspace(-80, 80, 448), torch.linspace(-1, 1, 64)])
    out = torch.empty_like(x)
    softplus_kernel_of_test[(1,)](x, out, 512)
    expected = torch.log1p(torch.exp(x.double()))
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)


def test_heads_that_lie_apart_are_copied() -> None:
    fused = torch.arange(48.0).view(2, 3, 8)
    assert dense_tokens(fused[:, 1:]).data_ptr() == fused[:, 1:].data_ptr()
    apart = fused[:, :, :4]
    assert dense_tokens(apart).stride() == (12, 4, 1)
    assert torch.equal(dense_tokens(apart), apart)
