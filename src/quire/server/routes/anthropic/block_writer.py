"""Writes parsed events of the model's text as Anthropic's content blocks: whole, or as a stream.

The joined stream events are equal to the whole blocks. Called by `messages`.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pydantic_core

from quire.server.generation.collected_message import (
    CallPart,
    MessagePart,
    ReasoningPart,
    TextPart,
)
from quire.server.http.streaming import named_event
from quire.server.routes.anthropic.message import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJSONDelta,
    SignatureDelta,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingBlockDelta,
    ToolUseBlock,
)
from quire.text.parsers.message_events import (
    CallArguments,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)

_DIGEST_BYTES = 48


class BlockWriter:
    """Writes the stream events of one message's blocks.

    Invariant: at most one block is open. It has the index _num_blocks - 1 and the kind _kind.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        """Without `shows_thinking`, thinking blocks have only a signature."""
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._kind: type[MessageEvent] | None = None
        self._digest = _new_digest()

    def write(self, events: Iterable[MessageEvent]) -> Iterator[bytes]:
        """The stream events of new parsed events."""
        for event in events:
            if isinstance(event, str):
                yield from self._open(str, TextBlock(""))
                yield self._delta(TextBlockDelta(event))
            elif isinstance(event, ReasoningPiece):
                yield from self._open(ReasoningPiece, ThinkingBlock("", ""))
                self._digest.update(event.text.encode())
                if self._shows_thinking:
                    yield self._delta(ThinkingBlockDelta(event.text))
            elif isinstance(event, CallStart):
                assert event.call_id is not None, "`ChatAnswer` has set one"
                yield from self.close()
                yield from self._open(CallStart, ToolUseBlock(event.call_id, event.name, {}))
            elif isinstance(event, CallArguments):
                yield self._delta(InputJSONDelta(event.text))
            else:
                yield from self.close()

    def close(self) -> Iterator[bytes]:
        """End the open block, if any, even if its content is incomplete."""
        if self._kind is None:
            return
        if self._kind is ReasoningPiece:
            yield self._delta(SignatureDelta(_signature(self._digest)))
            self._digest = _new_digest()
        self._kind = None
        yield named_event("content_block_stop", BlockStop(self._num_blocks - 1))

    def _open(
        self, kind: type[MessageEvent], block: TextBlock | ThinkingBlock | ToolUseBlock
    ) -> Iterator[bytes]:
        """Begin a block, unless a block of this kind is open."""
        if self._kind is kind:
            return
        yield from self.close()
        self._kind = kind
        self._num_blocks += 1
        yield named_event("content_block_start", BlockStart(self._num_blocks - 1, block))

    def _delta(
        self, delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputJSONDelta
    ) -> bytes:
        return named_event("content_block_delta", BlockDelta(self._num_blocks - 1, delta))


def whole_blocks(parts: Sequence[MessagePart], *, shows_thinking: bool = True) -> Iterator[bytes]:
    """The JSON of all blocks, with commas between them."""
    for at, part in enumerate(parts):
        if at:
            yield b","
        yield msgspec.json.encode(_block(part, shows_thinking=shows_thinking))


def _block(part: MessagePart, *, shows_thinking: bool) -> TextBlock | ThinkingBlock | ToolUseBlock:
    if isinstance(part, TextPart):
        return TextBlock(part.text)
    if isinstance(part, ReasoningPart):
        digest = _new_digest()
        digest.update(part.text.encode())
        return ThinkingBlock(part.text if shows_thinking else "", _signature(digest))
    return ToolUseBlock(part.call_id, part.name, input_of(part))


def input_of(call: CallPart) -> dict[str, Any]:
    """The call's arguments so far as an object. Text that is no JSON object, or is nested too
    deeply to be parsed, is returned as {"arguments": text}."""
    text = call.arguments
    if not text:
        return {}
    try:
        value = pydantic_core.from_json(text, allow_partial=not call.is_complete)
    except ValueError:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}


def _new_digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _signature(digest: "hashlib.blake2b") -> str:
    """A digest of the thinking as the signature, since clients require a string. Nothing is signed
    or checked."""
    return base64.b64encode(digest.digest()).decode()
