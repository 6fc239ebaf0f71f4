"""The server-sent events of a streamed response, each with its name and JSON fields."""

from typing import TypeAlias

import msgspec

from quire.server.http.streaming import named_event
from quire.server.routes.openai.logprobs import ChatTokenLogprob
from quire.server.routes.openai.responses.response_object import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
)

ContentPart: TypeAlias = OutputText | ReasoningText


class StreamEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event of the stream."""

    #: Position in the stream, starting at 0.
    sequence_number: int = -1


class _OfResponse(StreamEvent, kw_only=True):
    response: ResponseObject


class Created(_OfResponse, kw_only=True, tag="response.created"):
    """The first event of a stream."""


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    """The second event of a stream."""


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    """The last event of a complete answer, with the whole response."""


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    """The last event of an answer that was cut off by max_output_tokens or a full context."""


class ResponseFailed(_OfResponse, kw_only=True, tag="response.failed"):
    """The last event after an error."""


class StreamError(StreamEvent, kw_only=True, tag="error"):
    """The error that ended the response."""

    code: str | None
    message: str
    param: str | None = None


class _OfItem(StreamEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    """The beginning of an item."""


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    """A complete item."""


class _InItem(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_InPart, kw_only=True, tag="response.content_part.added"):
    """The beginning of an item's text."""

    part: ContentPart


class PartDone(_InPart, kw_only=True, tag="response.content_part.done"):
    """An item's complete text."""

    part: ContentPart


class TextDelta(_InPart, kw_only=True, tag="response.output_text.delta"):
    """A further part of a message's text."""

    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_InPart, kw_only=True, tag="response.output_text.done"):
    """A message's complete text."""

    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_InPart, kw_only=True, tag="response.reasoning_text.delta"):
    """A further part of the reasoning."""

    delta: str


class ReasoningDone(_InPart, kw_only=True, tag="response.reasoning_text.done"):
    """An item's complete reasoning."""

    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """A further part of a function call's arguments."""

    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """A function call's complete arguments."""

    name: str
    arguments: str


class InputDelta(_InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """A further part of a custom tool's input."""

    delta: str


class InputDone(_InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    """A custom tool's complete input."""

    input: str


def encoded(event: StreamEvent) -> bytes:
    """The event as a server-sent event with its name."""
    return named_event(str(type(event).__struct_config__.tag), event)
