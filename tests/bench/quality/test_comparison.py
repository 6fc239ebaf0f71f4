"""Figures of distributions beside others: by their definitions."""

import math

import pytest
import torch

from quire.bench.quality.comparison import Reference, compare
from quire.bench.quality.windows import Window

EXACT = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]).log()
FOUND = torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.8, 0.1]]).log()


def _logits(hidden: torch.Tensor) -> torch.Tensor:
    """Logits are the hidden states, in memory that the next call overwrites."""
    return hidden.clone()


def test_figures_follow_their_definitions():
    window = Window((0, 2, 1), 1)
    found = compare([window], [FOUND], _logits, Reference([EXACT], _logits))
    assert found.num_tokens == 2 and found.agreement == 0.5
    assert found.loss == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.4))
    changes = [math.log(0.25 / 0.5), math.log(0.7 / 0.8)]
    assert found.loss_change == pytest.approx(sum(changes) / 2)
    assert found.change == pytest.approx(math.sqrt(0.25 * 0.7 / (0.5 * 0.8)) - 1)
    spread = abs(changes[0] - changes[1]) / 2
    assert found.loss_change_error == pytest.approx(spread / math.sqrt(2))
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.2 * math.log(2) + 0.7 * math.log(0.7 / 0.8)
    assert found.divergence == pytest.approx((first + second) / 2)
    assert found.divergence_p99 == pytest.approx(max(first, second))


def test_only_tokens_that_count_are_compared():
    windows = [Window((2, 0, 2), 2), Window((1, 1), 1)]
    found = compare(
        windows, [FOUND[:1], FOUND[1:]], _logits, Reference([EXACT[:1], EXACT[1:]], _logits)
    )
    assert found.num_tokens == 2
    assert found.loss == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)


def test_equals_differ_in_nothing():
    window = Window((0, 2, 1), 1)
    found = compare([window], [EXACT], _logits, Reference([EXACT], _logits))
    assert (found.change, found.loss_change_error, found.divergence) == (0.0, 0.0, 0.0)
    assert found.agreement == 1.0


def test_many_positions_are_compared_in_pieces():
    generator = torch.Generator().manual_seed(0)
    exact, other = torch.randn(2, 300, 5, generator=generator)
    window = Window(tuple(torch.randint(5, (301,), generator=generator).tolist()), 1)
    sizes: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    found = compare([window], [other], logits, Reference([exact], _logits))
    terms = torch.nn.functional.kl_div(
        other.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert sizes == [128, 128, 44]
    assert found.divergence == pytest.approx(terms.mean().item(), rel=1e-5)
    assert found.divergence_p99 == pytest.approx(terms.sort().values[296].item(), rel=1e-5)
