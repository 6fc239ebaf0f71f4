"""Requests for a vector, or scores, of their prompt instead of tokens.

Such a request is a prompt and nothing else: it ends when its last token is computed. What its
result is made of is said here in full, so that the runner needs to know no model folder. Plain
data; made by `engine_client.pooling_inputs`, read by the scheduler (`reads_whole_prompt`,
`in_one_step`) and by `runtime.row_pooling`.
"""

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """Which hidden states become one vector: of the first token, of the last, or their mean. ALL:
    each becomes a vector of its own."""

    CLS = "cls"
    LAST = "last"
    MEAN = "mean"
    ALL = "all"


class Activation(StrEnum):
    """What is done with the scores of a head."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class PairForm(StrEnum):
    """How two texts become one prompt: as the tokenizer joins them, or in the words that Qwen3's
    rerankers were trained with."""

    JOINED = "joined"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the hidden states of one prompt become its result.

    kind: which of them are taken. in_one_step: the model's tokens attend to those behind them, so
        that all are computed in one step.
    dimensions: only so many elements of the vector are kept, the first ones; None: all.
        normalize: it is divided by its length, after that.
    wants_scores: the result is what the model's head says of the vector, through `activation`;
        where there are score_token_ids, it is the head that predicts tokens, and its logits of
        these tokens alone.

    All this is done with each vector, of a kind that has one for each token.
    """

    kind: PoolingKind = PoolingKind.LAST
    in_one_step: bool = False
    dimensions: int | None = None
    normalize: bool = True
    wants_scores: bool = False
    score_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.NONE

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether hidden states of all tokens are needed, so that none comes from the cache."""
        return self.in_one_step or self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model's folder says that it pools; every model can.

    kind, normalize, in_one_step, score_token_ids, activation: see `PoolingParams`.
    pair_form: of the pairs that it scores. num_dimensions: of its vectors. num_scores: of its head,
        0 where it has none that scores. scores_tokens: the head is one for single tokens.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    in_one_step: bool = False
    num_dimensions: int = 0
    num_scores: int = 0
    score_token_ids: tuple[int, ...] = ()
    activation: Activation = Activation.NONE
    pair_form: PairForm = PairForm.JOINED
    scores_tokens: bool = False

    @property
    def can_score(self) -> bool:
        """Whether the model itself says how well two texts go together."""
        has_one = self.num_scores == 1 and not self.scores_tokens
        return has_one or bool(self.score_token_ids)
