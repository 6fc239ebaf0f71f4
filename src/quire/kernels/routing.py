"""Chooses each token's experts and their weights, in torch.

Called by `kernels.operators`. This is the reference of the native kernel. A token has a logit for
each expert. The scores of experts are

    SOFTMAX            softmax of all logits
    SIGMOID            sigmoid of each logit
    SOFTMAX_OF_CHOSEN  the logits; the weights are their softmax over the chosen experts

The `top_k` experts with the largest scores are chosen. With equal scores, the lower id is first. A
bias may be added to the scores for this choice only, not for the weights (DeepSeek-V3,
arXiv:2412.19437, section 2.1.2). The choice may be limited to the best groups of experts
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Shapes: T tokens, E experts, K experts of a token.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from quire.kernels.whole_vectors import in_whole_vectors

RENORMALIZATION_EPS = 1e-20
"""Added to the sum that a token's SIGMOID weights are divided by, as in DeepSeek-V3."""


class Scoring(Enum):
    """The function from logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The rule by which a layer's router chooses experts."""

    num_experts: int
    #: K, the number of experts of a token.
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    #: Whether a token's weights are divided by their sum.
    renormalizes: bool = False
    #: Whether weights are rounded to the model's dtype.
    rounds: bool = False
    #: The number of groups, each of experts with adjacent ids.
    num_groups: int = 1
    #: The number of best groups from which experts are chosen.
    top_groups: int = 1
    #: Whether a group is rated by the sum of its two best scores, instead of by its best score.
    sums_best: bool = False
    #: Whether a bias is added to the scores for the choice.
    has_bias: bool = False
    #: Whether `bias` of `route` holds factors of the chosen experts' weights, applied last.
    has_scales: bool = False
    #: The factor by which all weights are multiplied.
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but must be 1 to {self.num_experts}")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"num_groups is {self.num_groups}, but must divide num_experts, "
                f"{self.num_experts}, and top_groups is {self.top_groups}, but must be 1 to "
                "num_groups"
            )
        if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
            raise ValueError(
                f"top_k is {self.top_k}, but top_groups={self.top_groups} groups have fewer experts"
            )
        if self.sums_best and self.num_experts // self.num_groups < 2:
            raise ValueError(
                f"num_groups is {self.num_groups}, but with sums_best each group needs at least "
                f"2 of the {self.num_experts} experts"
            )
        assert not (self.has_bias and self.has_scales)


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts and their weights."""

    #: [T, K] int64 below E, distinct for each token.
    ids: torch.Tensor
    #: [T, K] fp32.
    weights: torch.Tensor


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, dtype: torch.dtype
) -> Routing:
    """logits [T, E] of any floating dtype, bias [E] fp32 or None, the model's dtype -> routing."""
    if logits.shape[1:] != (spec.num_experts,):
        raise ValueError(f"logits are {tuple(logits.shape)}, but must be [T, {spec.num_experts}]")
    scores = logits.float()
    if spec.scoring is Scoring.SOFTMAX:
        scores = scores.softmax(-1)
    elif spec.scoring is Scoring.SIGMOID:
        scores = in_whole_vectors(torch.sigmoid, scores)
    choice = scores if bias is None or spec.has_scales else scores + bias
    ids = largest(_eligible(choice, spec), spec.top_k)
    weights = scores.gather(1, ids)
    if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if spec.renormalizes:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (
            total + RENORMALIZATION_EPS if spec.scoring is Scoring.SIGMOID else total
        )
    if spec.scale != 1.0:
        weights = weights * spec.scale
    if spec.has_scales:
        assert bias is not None
        weights = weights * bias[ids]
    return Routing(ids, weights.to(dtype).float() if spec.rounds else weights)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """values [T, N] -> indices [T, count] of the largest, in descending order of values.

    If values are equal, the lower index comes first; `torch.topk` does not define their order.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _eligible(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The scores [T, E], with minus infinity for experts of groups that are not chosen."""
    if spec.top_groups == spec.num_groups:
        return scores
    grouped = scores.view(len(scores), spec.num_groups, -1)
    best = grouped.topk(2 if spec.sums_best else 1, dim=-1).values.sum(-1)
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, largest(best, spec.top_groups), True
    )
    return grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).view_as(scores)
