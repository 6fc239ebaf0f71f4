"""The norm layer hands its weight and epsilon to the kernel."""

import pytest
import torch

from quire.layers.norm import RMSNorm


@pytest.fixture
def norm() -> RMSNorm:
    norm = RMSNorm(4, 0.5, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return norm


def test_normalises_with_its_weight_and_epsilon(norm):
    # mean square 3.5, and 0.5 on top: divided by 2
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    torch.testing.assert_close(norm(x), torch.tensor([[0.5, 2.0, 4.5, 0.0]]))


def test_adds_first(norm):
    x, residual = torch.tensor([[1.0, 1.0, 1.0, 1.0]]), torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    normed, total = norm.add(x, residual)
    assert total.tolist() == [[1.0, 2.0, 3.0, 0.0]]
    torch.testing.assert_close(normed, torch.tensor([[0.5, 2.0, 4.5, 0.0]]))
