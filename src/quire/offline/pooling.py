"""Computes embeddings and scores for the methods of `pooling_engine`.

Results have the types of vLLM's methods of the same names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from quire.engine_client.image_prompts import no_images
from quire.engine_client.inputs import NO_OPTIONS, PromptInput, RequestOptions, read_prompt
from quire.engine_client.pooling_inputs import (
    PoolingInput,
    PoolingInputs,
    Truncation,
    numbers_of,
    score_of,
    similarity,
)
from quire.errors import InvalidRequestError, QuireError, StepFailedError, shown
from quire.offline.pooling_arguments import (
    CLASSIFY,
    EMBED,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    TOKEN_TASKS,
)
from quire.offline.request_table import RequestTable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of a prompt by a classifier."""

    #: The output of the model's head for each label, after the head's activation.
    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts: how well they match."""

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """The result of `LLM.encode` for a prompt."""

    #: [N] fp32, or [T, N] with a row for each token.
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of a prompt or of a pair of texts."""

    request_id: str
    #: An EmbeddingOutput, ClassificationOutput, ScoringOutput or PoolingOutput.
    outputs: T
    #: The computed tokens; for a similarity, the tokens of both texts.
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Always True, since results are complete."""
        return True


Pooled: TypeAlias = PoolingRequestOutput[bytes]


class OfflinePooling:
    """Computes embeddings and scores for one `LLM`; any number of threads may call it."""

    def __init__(
        self, requests: RequestTable, inputs: PoolingInputs, task: str | None = None
    ) -> None:
        """`task` is the task in the argument pooler_config; None means the model's own task."""
        self._task = task
        self._requests = requests
        self._inputs = inputs

    def embed(self, prompts: Sequence[PromptInput], **how: Any) -> list[Any]:
        """See `LLM.embed`. `how` has arguments of `PoolingInputs.embed`."""
        given = [(self._inputs.embed(each.prompt, **how), each.options) for each in prompts]
        return [
            _replaced(found, EmbeddingOutput(numbers_of(found.outputs)))
            for found in self._run(given)
        ]

    def classify(self, prompts: Sequence[PromptInput], **how: Any) -> list[Any]:
        """See `LLM.classify`."""
        given = [(self._inputs.classify(each.prompt, **how), each.options) for each in prompts]
        return [
            _replaced(found, ClassificationOutput(numbers_of(found.outputs)))
            for found in self._run(given)
        ]

    def encode(self, prompts: Sequence[PromptInput], task: str, **how: Any) -> list[Any]:
        """See `LLM.encode`. `how` has arguments of the method of `PoolingInputs` for the task."""
        makers: Mapping[str, Callable[..., PoolingInput]] = {
            EMBED: self._inputs.embed,
            CLASSIFY: self._inputs.classify,
            TOKEN_EMBED: self._inputs.embed_tokens,
            TOKEN_CLASSIFY: self._inputs.classify_tokens,
        }
        make = makers[task]
        given = [(make(each.prompt, **how), each.options) for each in prompts]
        return [
            _replaced(found, PoolingOutput(_tensor_of(found, per_token=task in TOKEN_TASKS)))
            for found in self._run(given)
        ]

    @property
    def usual_task(self) -> str:
        """The task of a call that names no task."""
        if self._task is not None:
            return self._task
        pooling = self._inputs.pooling
        if pooling.num_scores:
            return TOKEN_CLASSIFY if pooling.scores_tokens else CLASSIFY
        return EMBED

    def score(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None, truncation: Truncation
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """See `LLM.score`."""
        # A model with scores computes each pair as one prompt.
        if self._inputs.has_scores:
            given = [
                self._inputs.pair(*pair, instruction=instruction, truncation=truncation)
                for pair in pairs
            ]
            return [
                _replaced(found, ScoringOutput(score_of(found.outputs)))
                for found in self._run([(each, NO_OPTIONS) for each in given])
            ]
        if instruction is not None:
            raise InvalidRequestError(
                "this model compares embeddings; leave instruction out", "instruction"
            )
        # Other models embed each distinct text once, and the vectors are compared.
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        is_late = self._task == TOKEN_EMBED
        make = self._inputs.embed_tokens if is_late else self._inputs.embed
        given = [make(text, truncation=truncation) for text in texts]
        results = self._run([(each, NO_OPTIONS) for each in given])
        found = dict(zip(texts, results, strict=True))
        compare = _late_interaction if is_late else _cosine
        return [_compared(found[first], found[second], compare) for first, second in pairs]

    def score_rendered(
        self, rendered: Sequence[list[int]], *, truncation: Truncation
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score pairs of texts that a template has rendered to token ids."""
        given = [self._inputs.written_pair(token_ids, truncation) for token_ids in rendered]
        return [
            _replaced(found, ScoringOutput(score_of(found.outputs)))
            for found in self._run([(each, NO_OPTIONS) for each in given])
        ]

    def _run(
        self, given: Sequence[tuple[PoolingInput, RequestOptions]]
    ) -> list[PoolingRequestOutput[bytes]]:
        """Run the inputs. Returns their results in order. Raises StepFailedError if an input's
        computation fails."""
        group = self._requests.prepare_pooling(given)
        try:
            self._requests.open(group)
            self._requests.wait(group, for_all=True)
        finally:
            self._requests.close(group)
        found = []
        for assembler in group.assemblers:
            output = assembler.output
            if assembler.pooled is None:
                raise _failure(output.error)
            found.append(
                PoolingRequestOutput(
                    output.request_id,
                    assembler.pooled,
                    output.prompt_token_ids,
                    output.num_cached_tokens,
                )
            )
        return found


def read_pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair one text of `data_1` with each text of `data_2`, or two lists of equal length by index.

    Raises InvalidRequestError.
    """
    first, second = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"data_1 has {len(first)} texts and data_2 {len(second)}; give one, or as many",
            "data_1",
        )
    return list(zip(first, second, strict=True))


def read_prompts(prompts: Any) -> list[PromptInput]:
    """Read one prompt or a list of prompts. Raises InvalidRequestError."""
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    if not isinstance(listed, Sequence):
        raise InvalidRequestError(
            f"prompts is {shown(prompts)}, but must be a text, a mapping with prompt_token_ids, or"
            " a list of these",
            "prompts",
        )
    found = [no_images(read_prompt(prompt)) for prompt in listed]
    if any(prompt.prediction is not None for prompt in found):
        raise InvalidRequestError(
            "a prompt has a prediction, but no text is generated here; leave it out", "prediction"
        )
    return found


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers of a vector, and its length."""
    numbers = list(embeds)
    shown_numbers = f"{str(numbers[:4])[:-1]}, ...]" if len(numbers) > 4 else str(numbers)
    print(f"{prefix}: {shown_numbers} (size={len(numbers)})")


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        return list(texts)
    raise InvalidRequestError(
        f"{name} is {shown(given)}, but must be a text or a list of texts", name
    )


def _tensor_of(found: PoolingRequestOutput[bytes], *, per_token: bool) -> torch.Tensor:
    numbers = torch.frombuffer(bytearray(found.outputs), dtype=torch.float32)
    return numbers.view(len(found.prompt_token_ids), -1) if per_token else numbers


def _replaced(found: PoolingRequestOutput[bytes], outputs: T) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(
        found.request_id, outputs, found.prompt_token_ids, found.num_cached_tokens
    )


def _cosine(first: Pooled, second: Pooled) -> float:
    return similarity(numbers_of(first.outputs), numbers_of(second.outputs))


def _late_interaction(first: Pooled, second: Pooled) -> float:
    """The score of ColBERT (arXiv:2004.12832), 3.3: the sum, over the tokens of the first text, of
    the largest product with a token of the second text."""
    tokens, others = (_tensor_of(each, per_token=True) for each in (first, second))
    return float((tokens @ others.T).amax(dim=1).sum())


def _compared(
    first: Pooled, second: Pooled, compare: Callable[[Pooled, Pooled], float]
) -> PoolingRequestOutput[ScoringOutput]:
    return PoolingRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(compare(first, second)),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
    )


def _failure(error: str | None) -> QuireError:
    return StepFailedError(error or "the call was interrupted")
