"""Pooling requests, which return a vector or scores for their prompt instead of tokens.

A pooling request ends when the last token of its prompt is computed. These classes describe its
result completely, so that the runner need not read the model's folder. Plain data, made by
`engine_client.pooling_inputs` and read by the scheduler and by `runtime.row_pooling`.
"""

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """Which hidden states become the vector: the first token's, the last token's, their mean, or
    each one separately (ALL)."""

    CLS = "cls"
    LAST = "last"
    MEAN = "mean"
    ALL = "all"


class Activation(StrEnum):
    """The function applied to the scores of a head."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class PairForm(StrEnum):
    """How two texts become one prompt: joined by the tokenizer, or with the prompt template of
    Qwen3's rerankers."""

    JOINED = "joined"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the hidden states of one prompt become its result.

    The vector is shortened, normalized and scored as the fields say. With PoolingKind.ALL, this is
    done to the vector of each token.
    """

    kind: PoolingKind = PoolingKind.LAST
    #: Whether tokens attend to later tokens, so that all must be computed in one step.
    in_one_step: bool = False
    #: Number of leading elements of the vector that are kept; None keeps all.
    dimensions: int | None = None
    #: Whether the vector is then divided by its length.
    normalize: bool = True
    #: Whether the result is the output of the model's head for the vector, after `activation`.
    wants_scores: bool = False
    #: If not empty, the scores are the logits of these tokens, from the language model head.
    score_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.NONE

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that none can come from the
        cache."""
        return self.in_one_step or self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model pools by default, as read from its folder; every model can pool.

    Fields without a comment are explained in `PoolingParams`.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    in_one_step: bool = False
    #: Number of elements in a vector.
    num_dimensions: int = 0
    #: Number of scores that the model's head returns; 0 without a scoring head.
    num_scores: int = 0
    score_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.NONE
    #: How a pair of texts to score becomes a prompt.
    pair_form: PairForm = PairForm.JOINED
    #: Whether the head scores single tokens.
    scores_tokens: bool = False

    @property
    def can_score(self) -> bool:
        """Whether the model itself scores how well two texts match."""
        has_one = self.num_scores == 1 and not self.scores_tokens
        return has_one or bool(self.score_token_ids)
