"""Compares a model's next-token distributions with a reference's, over the same windows of a text.

Of the reference, only its output head and the hidden states of all counted positions are kept. Its
layers are freed before other models are compared. Hidden states take far less memory than
distributions, which the head computes for some positions at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quire.attention.kv_rounding import divergence
from quire.bench.quality.windows import Window
from quire.runtime.model_runner import PROMPT_LOGPROB_ROWS

Logits = Callable[[torch.Tensor], torch.Tensor]
"""hidden [rows, hidden size] -> logits [rows, vocabulary] fp32, for at most PROMPT_LOGPROB_ROWS
rows."""

_TOP_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a model's predictions of a text, and their distance from the reference's.

    All means are over the tokens that count (see `windows`).
    """

    #: The number of tokens that count.
    num_tokens: int

    #: Mean negative log-likelihood, in nats.
    loss: float

    #: Mean of this loss minus the reference's, in nats, and the standard error of that mean.
    loss_change: float
    loss_change_error: float

    #: Mean Kullback-Leibler divergence from the reference's distributions, in nats.
    divergence: float

    #: The 99th percentile of that divergence.
    divergence_p99: float

    #: Share of tokens for which both models predict the same likeliest token.
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def change(self) -> float:
        """The change of perplexity, as a share of the reference's perplexity."""
        return math.expm1(self.loss_change)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's hidden states in all windows, and its output head."""

    #: [counted tokens, hidden size] for each window, at the positions that predict counted tokens.
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
    """Compare a model with a reference. `hidden` and `logits` are the model's, as in `Reference`.

    `hidden` may be an iterator that computes each window when it is needed.
    """
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
    """Four figures per token, [4, tokens] fp64 on the CPU, from logits [tokens, vocabulary].

    The rows are the loss, its change, the divergence, and 1 if both models agree, else 0.
    """
    exact, found = torch.log_softmax(exact, dim=-1), torch.log_softmax(found, dim=-1)
    losses = [-each.gather(1, following[:, None])[:, 0].double() for each in (found, exact)]
    agrees = exact.argmax(-1) == found.argmax(-1)
    rows = (losses[0], losses[0] - losses[1], divergence(exact, found), agrees)
    return torch.stack([each.double().cpu() for each in rows])
