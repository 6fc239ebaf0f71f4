"""The structs of a Responses answer: the response, its output items, its usage."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.routes.openai.logprobs import ChatTokenLogprob

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    #: Log-probabilities of the text's tokens, if the caller asked for them.
    logprobs: list[ChatTokenLogprob] = msgspec.field(default_factory=list)


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    status: ItemStatus
    #: Empty until the text begins; then one OutputText.
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A part of the model's reasoning.

    It is neither summarized nor encrypted. A client may send it back unchanged in the next input.
    """

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    #: Arguments as JSON; only the beginning of the JSON while the status is not completed.
    arguments: str
    #: Namespace of the function; unset if it has none.
    namespace: str | UnsetType = UNSET


class CustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    #: Free text.
    input: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCall | CustomCall


class InputTokensDetails(msgspec.Struct):
    """Details of the input tokens."""

    #: Tokens that were served from the prefix cache.
    cached_tokens: int
    #: Tokens whose caching is billed; always 0.
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Details of the output tokens."""

    #: Tokens of the reasoning items.
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of one call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """The reason for which an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    """The error of a failed response."""

    #: One of OpenAI's codes.
    code: str
    message: str


class Echo(msgspec.Struct, kw_only=True):
    """The fields of the request that the answer repeats.

    Numbers and tool fields that the request lacks have defaults, because clients that check the
    schema expect them.
    """

    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=dict)
    safety_identifier: str | None = None
    service_tier: str = "default"
    #: Whether the answer is stored.
    store: bool = False
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    background: Literal[False] = False


class RawMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="raw_message_tokens"):
    """The prompt or the model's output, including special tokens."""

    #: The tokens as text.
    message: str
    tokens: list[int]


class ResponseObject(Echo, kw_only=True):
    """The response. Fields that are known only at the end come after the output."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    output: list[OutputItem]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    usage: ResponseUsage | None = None
    #: The prompt and the output as text and tokens; null unless enable_response_messages is set.
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None
