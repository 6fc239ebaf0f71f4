"""Anthropic's message, its blocks, and the events that it is streamed as.

Each struct is tagged with its `type`. Plain data, written by msgspec.
"""

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Some of the answer's text."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What was thought before the blocks that follow. signature: always the same for one text."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool that the caller is to run."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct):
    """thinking_tokens: of the output those that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of one call. The prompt has input_tokens and cache_read_input_tokens together: the
    latter came from the prefix cache. Writing to the cache costs nothing, and is not counted."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: Literal[0] = 0
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """The whole answer. stop_sequence: the one of the caller's that ended it."""

    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """input_tokens: all tokens of the prompt, whatever the prefix cache has of them."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """message: without content yet."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """content_block: without content yet."""

    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextBlockDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text block."""

    text: str


class ThinkingBlockDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before it stops."""

    signature: str


class InputJSONDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON that the input of a tool_use block is."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """What is new in a block."""

    index: int
    delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputJSONDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageEnd(msgspec.Struct):
    """Why a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """Comes once, behind the blocks. usage: of the whole call."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class PingEvent(msgspec.Struct, tag_field="type", tag="ping"):
    """Says that the stream lives."""
