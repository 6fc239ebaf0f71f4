"""The weighted sum of experts: its order, its roundings, and who is called."""

import torch

from quire.kernels.experts import mix_experts
from quire.kernels.routing import Routing


def test_each_token_has_the_weighted_sum_of_its_experts() -> None:
    x = torch.randn(5, 6)
    ids = torch.tensor([[2, 0], [1, 3], [3, 2], [0, 1], [2, 3]])
    weights = torch.rand(5, 2)
    matrices = torch.randn(4, 6, 6)

    found = mix_experts(x, Routing(ids, weights), lambda expert, rows: rows @ matrices[expert])

    for token in range(5):
        expected = sum(
            weight * (x[token] @ matrices[expert])
            for expert, weight in zip(ids[token], weights[token], strict=True)
        )
        torch.testing.assert_close(found[token], expected)


def test_experts_are_called_in_ascending_order_and_once() -> None:
    calls: list[tuple[int, int]] = []

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        calls.append((expert, len(rows)))
        return rows

    ids = torch.tensor([[7, 0], [3, 7], [7, 1]])
    mix_experts(torch.ones(3, 2), Routing(ids, torch.ones(3, 2)), compute)

    assert calls == [(0, 1), (1, 1), (3, 1), (7, 3)]


def test_each_sum_is_rounded_to_the_models_dtype() -> None:
    """1 + 2^-8 is no bf16, and 1 is the nearest: in the other order the small ones would count."""
    x = torch.tensor([[1.0]], dtype=torch.bfloat16)
    routing = Routing(torch.tensor([[2, 0, 1]]), torch.tensor([[2.0**-8, 1.0, 2.0**-8]]))

    found = mix_experts(x, routing, lambda _, rows: rows)

    assert found.dtype == torch.bfloat16 and found.item() == 1.0


def test_no_expert_is_called_without_tokens() -> None:
    nothing = Routing(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert mix_experts(torch.zeros(0, 3), nothing, lambda *_: 1 / 0).shape == (0, 3)
