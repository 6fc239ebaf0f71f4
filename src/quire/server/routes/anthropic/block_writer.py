"""Writes what a generated text means as Anthropic's content blocks: whole, or as events.

Joined, the events are the whole blocks. Called by `messages`. Knows no engine.
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
    TextPiece,
)

_DIGEST_BYTES = 48


class BlockWriter:
    """The events of one message's blocks.

    Invariant: at most one block is open: the one of the index _num_blocks - 1, of _kind.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        """shows_thinking: False: thinking blocks have a signature only."""
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._kind: type[MessageEvent] | None = None
        self._digest = _new_digest()

    def write(self, events: Iterable[MessageEvent]) -> Iterator[bytes]:
        """What is new."""
        for event in events:
            if isinstance(event, TextPiece):
                yield from self._open(TextPiece, TextBlock(""))
                yield self._delta(TextBlockDelta(event.text))
            elif isinstance(event, ReasoningPiece):
                yield from self._open(ReasoningPiece, ThinkingBlock("", ""))
                self._digest.update(event.text.encode())
                if self._shows_thinking:
                    yield self._delta(ThinkingBlockDelta(event.text))
            elif isinstance(event, CallStart):
                assert event.call_id is not None, "the answer has given it one"
                yield from self.close()
                yield from self._open(CallStart, ToolUseBlock(event.call_id, event.name, {}))
            elif isinstance(event, CallArguments):
                yield self._delta(InputJSONDelta(event.text))
            else:
                yield from self.close()

    def close(self) -> Iterator[bytes]:
        """Behind the last piece of a block, also of one that was cut off."""
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
        """Unless a block of that kind is open."""
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
    """The arguments, as far as they came: what clients make of the joined events, too. What is no
    object, or nested too deeply to be read, is given as its text, under the name `arguments`."""
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
    """Nothing is signed, and nothing checked: clients want a text that stands for the thinking."""
    return base64.b64encode(digest.digest()).decode()
