"""The answers of OpenAI's API, as plain structs that are encoded in microseconds.

A field that is UNSET does not appear; one that is None appears as null. Knows no engine. Called by
the API families.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine_client.outputs import RequestOutput

PromptLogprobs = list[dict[str, Any] | None]
"""For each prompt token but the first, by token id."""


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: served from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one call, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. text_offset: where its text begins in the choice's."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """stop_reason: the stop string or stop token that ended it.

    prompt_token_ids: come with a choice's first piece; token_ids: of this piece.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The whole answer, or one chunk of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens. bytes: its share of the text's UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The token that was chosen, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    """The assistant's answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    """stop_reason: the stop string or stop token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the message. The role comes with a choice's first chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """stop_reason: comes with finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One server-sent event. prompt_token_ids: come with each choice's first chunk."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


def usage_of(results: Sequence[RequestOutput], num_generated: int) -> Usage:
    """Each prompt counts once, however many choices it has."""
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_cached = sum(result.num_cached_tokens for result in results)
    return Usage(
        num_prompt, num_generated, num_prompt + num_generated, PromptTokensDetails(num_cached)
    )
