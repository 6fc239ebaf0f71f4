"""The structs of Anthropic's message, its content blocks, and its stream events.

Each struct is tagged with its `type`. Plain data, written by msgspec.
"""

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A part of the answer's text."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """A part of the model's reasoning."""

    thinking: str
    #: A digest of the text; equal texts have equal signatures.
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool, which the client runs."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct):
    """Details of the output tokens."""

    #: Output tokens that are reasoning.
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts of one call. The prompt's length is input_tokens + cache_read_input_tokens."""

    input_tokens: int
    output_tokens: int
    #: Prompt tokens that were served from the prefix cache.
    cache_read_input_tokens: int
    output_tokens_details: ThinkingTokens
    #: Always 0, since writing to the cache is not billed and not counted.
    cache_creation_input_tokens: Literal[0] = 0
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """The whole answer."""

    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    #: The caller's stop sequence that ended the answer; None if the answer ended otherwise.
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """The number of a prompt's tokens, cached or not."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event, with a message that has no content yet."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The beginning of a block that has no content yet."""

    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextBlockDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A further part of a text block."""

    text: str


class ThinkingBlockDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A further part of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before the block's end."""

    signature: str


class InputJSONDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A further part of the JSON input of a tool_use block."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """The new part of a block."""

    index: int
    delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputJSONDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageEnd(msgspec.Struct):
    """The reason for which a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The single event after the blocks, with the usage of the whole call."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class PingEvent(msgspec.Struct, tag_field="type", tag="ping"):
    """Shows that the stream is alive."""
