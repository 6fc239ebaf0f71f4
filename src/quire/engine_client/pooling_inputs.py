"""Turns texts into embedding and scoring requests, and decodes their results.

Uses no torch, since the API server and the offline API use this module.
"""

import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.pooling import (
    Activation,
    ModelPooling,
    PairForm,
    PoolingKind,
    PoolingParams,
)
from quire.core.request import Request, check_prompt
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.engine_client.inputs import NO_OPTIONS, RequestOptions, check_priority
from quire.errors import InvalidRequestError
from quire.text.special_tokens import Escape
from quire.text.tokenizer import Tokenizer

WHOLE_CONTEXT = -1
"""Value of truncate_prompt_tokens for the longest input that the model takes."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a long input is truncated."""

    #: The number of tokens to keep, or WHOLE_CONTEXT for the longest input that the model takes.
    #: None truncates nothing, so an input that is too long is refused.
    most: int | None = None
    #: Whether the last tokens are kept instead of the first.
    keeps_end: bool = False


WHOLE = Truncation()
"""Truncates nothing."""

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Default instruction of Qwen3's rerankers."""

# The prompt text around a pair, from the model card of Qwen3-Reranker.
_QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One prompt of a call that embeds or scores."""

    token_ids: list[int]
    params: PoolingParams

    def request(
        self, request_id: str, limits: ModelLimits, options: RequestOptions = NO_OPTIONS
    ) -> Request:
        """The request for the engine. Raises InvalidRequestError, PromptTooLongError."""
        check_priority(options, limits)
        check_prompt(self.token_ids, limits, generates=False)
        return Request(
            request_id,
            self.token_ids,
            DecodingParams(max_tokens=1, pooling=self.params),
            priority=options.priority,
            cache_domain=options.cache_domain,
            tenant=options.tenant,
            deadline_s=options.deadline_s,
        )


class PoolingInputs:
    """Makes the inputs of one model. May be used by any number of threads."""

    def __init__(self, tokenizer: Tokenizer | None, limits: ModelLimits) -> None:
        """Without a `tokenizer` only token ids are accepted."""
        self._tokenizer = tokenizer
        self._limits = limits

    @property
    def pooling(self) -> ModelPooling:
        """The pooling of the model."""
        return self._limits.pooling

    @property
    def has_scores(self) -> bool:
        """Whether the model scores pairs itself, instead of comparing their vectors."""
        return self.pooling.can_score or self.pooling.num_scores > 0

    def embed(
        self,
        prompt: str | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncation: Truncation = WHOLE,
    ) -> PoolingInput:
        """Make an input that is pooled to one vector.

        `dimensions` keeps the first elements only (Matryoshka). With `normalize` None, the model's
        folder decides. Raises InvalidRequestError.
        """
        params = self._vector_params(dimensions, normalize)
        return PoolingInput(self._token_ids(prompt, truncation), params)

    def embed_tokens(
        self,
        prompt: str | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncation: Truncation = WHOLE,
    ) -> PoolingInput:
        """Make an input that yields one vector for each token. Arguments and errors are those of
        `embed`."""
        params = replace(self._vector_params(dimensions, normalize), kind=PoolingKind.ALL)
        return PoolingInput(self._token_ids(prompt, truncation), params)

    def classify(
        self,
        prompt: str | Sequence[int],
        *,
        activates: bool | None = None,
        truncation: Truncation = WHOLE,
    ) -> PoolingInput:
        """Make an input that yields a score for each label. With `activates` False, the scores are
        the head's outputs before its activation function. Raises InvalidRequestError."""
        pooling = self.pooling
        if not pooling.num_scores:
            raise InvalidRequestError(
                "this model has no head that classifies (an architecture"
                " ...ForSequenceClassification); use /v1/embeddings (LLM.embed)"
            )
        if pooling.scores_tokens:
            raise InvalidRequestError(
                "this model classifies single tokens; use LLM.encode(...,"
                " pooling_task='token_classify')"
            )
        return PoolingInput(self._token_ids(prompt, truncation), self._score_params(activates))

    def classify_tokens(
        self,
        prompt: str | Sequence[int],
        *,
        activates: bool | None = None,
        truncation: Truncation = WHOLE,
    ) -> PoolingInput:
        """Make an input that yields the labels' scores for each token. Arguments and errors are
        those of `classify`."""
        pooling = self.pooling
        reads_first = pooling.kind is PoolingKind.CLS and not pooling.scores_tokens
        if not pooling.num_scores or reads_first:
            raise InvalidRequestError(
                "this model has no head that scores single tokens (an architecture"
                " ...ForTokenClassification, or a decoder's ...ForSequenceClassification)"
            )
        params = replace(self._score_params(activates), kind=PoolingKind.ALL)
        return PoolingInput(self._token_ids(prompt, truncation), params)

    def pair(
        self,
        first: str,
        second: str,
        *,
        instruction: str | None = None,
        truncation: Truncation = WHOLE,
    ) -> PoolingInput:
        """Make an input of two texts that get one score. If both together are too long, the second
        text is truncated.

        `instruction` describes the task, for models that were trained with instructions. Raises
        InvalidRequestError.
        """
        pooling, limits = self.pooling, self._limits
        self._check_pairs()
        truncation = self._checked(truncation)
        params = self._params(wants_scores=True)
        if pooling.pair_form is PairForm.QWEN3:
            return PoolingInput(self._qwen3(first, second, instruction, truncation), params)
        if instruction is not None:
            raise InvalidRequestError(
                "this model was trained without instructions; leave instruction out", "instruction"
            )
        token_ids, types = self._tokens_of("the texts").encode_pair(
            first, second, truncation.most, keeps_end=truncation.keeps_end
        )
        if limits.num_token_types > 1:
            token_ids = [
                token_id + kind * limits.vocab_size
                for token_id, kind in zip(token_ids, types, strict=True)
            ]
        return PoolingInput(token_ids, params)

    def written_pair(self, token_ids: list[int], truncation: Truncation = WHOLE) -> PoolingInput:
        """Make an input of two texts that the caller has combined into one prompt. Raises
        InvalidRequestError."""
        self._check_pairs()
        params = self._params(wants_scores=True)
        return PoolingInput(token_ids[: self._checked(truncation).most], params)

    def _check_pairs(self) -> None:
        pooling = self.pooling
        if pooling.scores_tokens:
            raise InvalidRequestError("this model scores no pairs: it classifies single tokens")
        if not pooling.can_score:
            raise InvalidRequestError(
                f"this model scores no pairs: its head has {pooling.num_scores} labels"
            )

    def _vector_params(self, dimensions: int | None, normalize: bool | None) -> PoolingParams:
        pooling = self.pooling
        if pooling.num_scores or (pooling.score_token_ids and not self._limits.generates):
            raise InvalidRequestError(
                "this model scores, it does not embed: use /score or /rerank (LLM.score)"
            )
        if dimensions is not None and not 1 <= dimensions <= pooling.num_dimensions:
            raise InvalidRequestError(
                f"dimensions is {dimensions}, but must be from 1 to {pooling.num_dimensions}, as"
                " many as the model's vectors have",
                "dimensions",
            )
        params = self._params(wants_scores=False)
        normalized = pooling.normalize if normalize is None else normalize
        return replace(params, dimensions=dimensions, normalize=normalized)

    def _score_params(self, activates: bool | None) -> PoolingParams:
        params = self._params(wants_scores=True)
        return replace(params, activation=Activation.NONE) if activates is False else params

    def _params(self, *, wants_scores: bool) -> PoolingParams:
        pooling = self.pooling
        return PoolingParams(
            kind=pooling.kind,
            in_one_step=pooling.in_one_step,
            wants_scores=wants_scores,
            score_token_ids=pooling.score_token_ids if wants_scores else (),
            activation=pooling.activation if wants_scores else Activation.NONE,
        )

    def _qwen3(
        self, query: str, document: str, instruction: str | None, truncation: Truncation
    ) -> list[int]:
        tokenizer = self._tokens_of("the texts")
        escape = Escape(tokenizer.special_tokens)
        said, query, document = escape.mark([instruction or INSTRUCTION, query, document])
        head = f"<Instruct>: {said}\n<Query>: {query}\n<Document>: "
        middle = escape.encode(head + document, add_special_tokens=False)
        before, after = (
            tokenizer.encode(part, add_special_tokens=False)
            for part in (_QWEN3_BEFORE, _QWEN3_AFTER)
        )
        most = truncation.most
        # Cut the document where the whole prompt exceeds the limit. With `keeps_end`, cut its
        # beginning.
        excess = 0 if most is None else len(before) + len(middle) + len(after) - most
        if excess > 0:
            first = len(middle) - excess
            if truncation.keeps_end:
                first = min(first, len(escape.encode(head, add_special_tokens=False)))
            first = max(0, first)
            middle = middle[:first] + middle[first + excess :]
        return before + middle + after

    def _token_ids(self, prompt: str | Sequence[int], truncation: Truncation) -> list[int]:
        most, keeps_end = (truncation := self._checked(truncation)).most, truncation.keeps_end
        if isinstance(prompt, str):
            tokenizer = self._tokens_of("the input")
            return tokenizer.encode_pair(prompt, None, most, keeps_end=keeps_end)[0]
        token_ids = list(prompt)
        if most is not None:
            token_ids = token_ids[-most:] if keeps_end else token_ids[:most]
        if token_ids:
            check_prompt(token_ids, replace(self._limits, num_token_types=1), generates=False)
        return token_ids

    def _checked(self, truncation: Truncation) -> Truncation:
        """The truncation with a number of tokens instead of WHOLE_CONTEXT."""
        most, longest = truncation.most, self._limits.max_model_len
        if most == WHOLE_CONTEXT:
            return replace(truncation, most=longest)
        if most is not None and not 1 <= most <= longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {most}, but must be {WHOLE_CONTEXT} (as long as the"
                f" model takes) or from 1 to max_model_len, {longest}",
                "truncate_prompt_tokens",
            )
        return truncation

    def _tokens_of(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{what} must be token ids: the engine runs without a tokenizer", "prompt"
            )
        return self._tokenizer


def numbers_of(pooled: bytes) -> list[float]:
    """Decode a pooled result to its numbers."""
    return list(struct.unpack(f"{len(pooled) // 4}f", pooled))


def score_of(pooled: bytes) -> float:
    """The score of a pair: the head's only score, or the probability of the token that means
    yes."""
    return numbers_of(pooled)[-1]


def similarity(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of two vectors; 0 if either of them is zero."""
    length = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / length if length else 0.0


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, first, second))
