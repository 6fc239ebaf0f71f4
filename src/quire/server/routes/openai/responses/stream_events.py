"""The events of a streamed response: their fields, and their names on the line before."""

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
    """sequence_number: 0 for the first of a stream, and so on."""

    sequence_number: int = -1


class _OfResponse(StreamEvent, kw_only=True):
    response: ResponseObject


class Created(_OfResponse, kw_only=True, tag="response.created"):
    """The first of a stream."""


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    """The second."""


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    """The last, with everything once more."""


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    """The last, where max_output_tokens or the context was too short."""


class ResponseFailed(_OfResponse, kw_only=True, tag="response.failed"):
    """The last, behind an error."""


class StreamError(StreamEvent, kw_only=True, tag="error"):
    """What went wrong."""

    code: str | None
    message: str
    param: str | None = None


class _OfItem(StreamEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    """An item is as it stays."""


class _InItem(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_InPart, kw_only=True, tag="response.content_part.added"):
    """A text of an item begins."""

    part: ContentPart


class PartDone(_InPart, kw_only=True, tag="response.content_part.done"):
    """A text of an item is whole."""

    part: ContentPart


class TextDelta(_InPart, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_InPart, kw_only=True, tag="response.output_text.done"):
    """All of a message's text."""

    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_InPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_InPart, kw_only=True, tag="response.reasoning_text.done"):
    """All of an item's reasoning."""

    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a function call's arguments."""

    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a function call's arguments."""

    name: str
    arguments: str


class InputDelta(_InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class InputDone(_InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All of a custom tool's input."""

    input: str


def encoded(event: StreamEvent) -> bytes:
    """As a server-sent event."""
    return named_event(str(type(event).__struct_config__.tag), event)
