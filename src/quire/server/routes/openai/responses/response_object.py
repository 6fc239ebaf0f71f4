"""The shape of an answer: the response, its output items, its usage."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.routes.openai.logprobs import ChatTokenLogprob

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A message's text. logprobs: of its tokens, where they were asked for."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = msgspec.field(default_factory=list)


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the assistant says. content: one text, once it has begun."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What was thought."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What was thought before the items that follow. Nothing is summarized and nothing encrypted:
    sent back as it is, it stands in its place again."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. arguments: JSON, a beginning of it while the status is not completed.
    namespace: that of the function, where it has one."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. input: free text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCall | CustomCall


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: served from the prefix cache. cache_write_tokens: those that are counted apart
    since their caching costs; none does here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: of the reasoning items."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of one call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    """Why there is no answer. code: one of OpenAI's."""

    code: str
    message: str


class Echo(msgspec.Struct, kw_only=True):
    """The body's own fields, as the answer has them; numbers and tools are complete, as clients
    that check an answer's schema expect. store: whether the answer is kept."""

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
    """What the model was given, or what it wrote, special tokens included. message: the text."""

    message: str
    tokens: list[int]


class ResponseObject(Echo, kw_only=True):
    """The whole answer. What is known only at the end stands behind the output.

    input_messages, output_messages: null, unless enable_response_messages was set.
    """

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
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None
