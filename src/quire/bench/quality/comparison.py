"""Compares next-token distributions with those of a reference, over the same windows of a text.

Of the reference the hidden states of all positions that count are kept, and its own head, which
makes distributions of them some positions at a time: they take far less memory than the
distributions, and the reference's layers are gone while others are compared with it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quire.attention.kv_rounding import divergence
from quire.bench.quality.windows import Window
from quire.runtime.model_runner import PROMPT_LOGPROB_ROWS

Logits = Callable[[torch.Tensor], torch.Tensor]
"""hidden [R, H] -> [R, V] fp32, R at most PROMPT_LOGPROB_ROWS."""

_TOP_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a model predicts a text, and how far its distributions are from the reference's.

    All means are over the tokens that count.
    """

    #: Tokens that count.
    num_tokens: int

    #: Mean negative log-likelihood, in nats.
    loss: float

    #: Mean difference to the reference's loss, in nats, and its standard error.
    loss_change: float
    loss_change_error: float

    #: Mean Kullback-Leibler divergence from the reference's distributions, in nats.
    divergence: float

    #: The 99th percentile of that divergence.
    divergence_p99: float

    #: Share of tokens for which both predict the same token as the likeliest.
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def change(self) -> float:
        """Change of the perplexity, as a share of the reference's."""
        return math.expm1(self.loss_change)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's states of all windows."""

    #: [W, H] for each window, at the positions that predict tokens that count.
    hidden: Sequence[torch.Tensor]

    #: The reference's head.
    logits: Logits


@torch.inference_mode()
def compare(
    windows: Sequence[Window],
    hidden: Iterable[torch.Tensor],
    logits: Logits,
    reference: Reference,
) -> Quality:
    """hidden, logits: of the model that is compared, as those of `Reference`; `hidden` is drawn
    from once a window."""
    found: list[torch.Tensor] = []
    for window, rows, exact in zip(windows, hidden, reference.hidden, strict=True):
        following = torch.tensor(window.token_ids[window.first :], device=rows.device)
        for part in _pieces(len(following)):
            exact_logits, found_logits = reference.logits(exact[part]), logits(rows[part])
            found.append(_figures(exact_logits, found_logits, following[part]))
    figures = torch.cat(found, dim=1)
    loss, change, diverged, agreed = figures.mean(1).tolist()
    num_tokens = figures.shape[1]
    return Quality(
        num_tokens=num_tokens,
        loss=loss,
        loss_change=change,
        loss_change_error=figures[1].std(correction=0).item() / math.sqrt(num_tokens),
        divergence=diverged,
        divergence_p99=figures[2].kthvalue(math.ceil(_TOP_SHARE * num_tokens)).values.item(),
        agreement=agreed,
    )


def _pieces(count: int) -> Iterator[slice]:
    for first in range(0, count, PROMPT_LOGPROB_ROWS):
        yield slice(first, min(first + PROMPT_LOGPROB_ROWS, count))


def _figures(exact: torch.Tensor, found: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """exact, found: logits [R, V]. Of each token its loss, the loss's change, its divergence, and 1
    where both agree: [4, R] fp64 on the CPU."""
    exact, found = torch.log_softmax(exact, dim=-1), torch.log_softmax(found, dim=-1)
    losses = [-each.gather(1, following[:, None])[:, 0].double() for each in (found, exact)]
    agrees = exact.argmax(-1) == found.argmax(-1)
    rows = (losses[0], losses[0] - losses[1], divergence(exact, found), agrees)
    return torch.stack([each.double().cpu() for each in rows])
