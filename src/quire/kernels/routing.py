"""Chooses the experts that compute each token, and their weights, in torch.

Called by `kernels.operators`; the native form has this as its reference. Of a token's logits, one
for each expert, the scores are

    SOFTMAX            softmax of all logits
    SIGMOID            sigmoid of each logit
    SOFTMAX_OF_CHOSEN  the logits themselves; their softmax is taken over those that are chosen

and the largest `top_k` are chosen, of two equal ones that of the lower id. A bias may be added to
the scores for the choice alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), and the choice may
be limited to the experts of the best groups (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Shapes: T tokens, E experts, K experts of a token.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from quire.kernels.whole_vectors import in_whole_vectors

RENORMALIZATION_EPS = 1e-20
"""Is added to the sum by which a sigmoid's weights are divided, as DeepSeek-V3 does."""


class Scoring(Enum):
    """How logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a layer's router chooses.

    num_experts, top_k: E and K.
    renormalizes: a token's weights are divided by their sum.
    rounds: weights are rounded to the model's dtype.
    num_groups, top_groups: experts form so many groups of neighbours, of which so many may be
        chosen from; 1 and 1: all may.
    sums_best: a group is as good as its two best experts' sum; else as its best one.
    has_bias: a bias is added to the scores for the choice.
    has_scales: what else would be the bias multiplies the chosen experts' weights, at last.
    scale: multiplies the weights.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalizes: bool = False
    rounds: bool = False
    num_groups: int = 1
    top_groups: int = 1
    sums_best: bool = False
    has_bias: bool = False
    has_scales: bool = False
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
            raise ValueError(f"top_k is {self.top_k}, more than {self.top_groups} groups have")
        if self.sums_best and self.num_experts // self.num_groups < 2:
            raise ValueError(
                f"num_groups is {self.num_groups}, but each group must have 2 of the "
                f"{self.num_experts} experts, the sum of which says how good it is"
            )
        assert not (self.has_bias and self.has_scales)


@dataclass(frozen=True, slots=True)
class Routing:
    """ids: [T, K] int64, each below E, those of a token all different. weights: [T, K] fp32."""

    ids: torch.Tensor
    weights: torch.Tensor


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, dtype: torch.dtype
) -> Routing:
    """logits [T, E] of any floating dtype, bias [E] fp32 or None. dtype: the model's."""
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
    """values [T, N] -> indices [T, count] of the largest, from the largest on; of equal ones the
    lower index first. (`torch.topk` leaves open which of them it takes.)"""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _eligible(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """scores [T, E]; minus infinity for the experts of groups that are not chosen."""
    if spec.top_groups == spec.num_groups:
        return scores
    grouped = scores.view(len(scores), spec.num_groups, -1)
    best = grouped.topk(2 if spec.sums_best else 1, dim=-1).values.sum(-1)
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, largest(best, spec.top_groups), True
    )
    return grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).view_as(scores)
