"""An assistant's message, put together from the events that its text means.

Its parts are in the order in which they came. Knows no API's form of it.
"""

from dataclasses import dataclass
from typing import TypeAlias

from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    MessageEvent,
    ReasoningPiece,
    TextPiece,
)


@dataclass(slots=True)
class TextPart:
    """Some of the answer's text."""

    text: str


@dataclass(slots=True)
class ReasoningPart:
    """What was thought before the parts that follow."""

    text: str


@dataclass(slots=True)
class CallPart:
    """A tool call. arguments: JSON, a beginning of it where `is_complete` is not set."""

    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


MessagePart: TypeAlias = TextPart | ReasoningPart | CallPart


class CollectedMessage:
    """What the events so far say.

    Invariant: no two parts of text, or of reasoning, stand beside each other.
    """

    def __init__(self) -> None:
        self.parts: list[MessagePart] = []
        self._calls: dict[int, CallPart] = {}

    @property
    def text(self) -> str:
        """All text of the answer."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """The tool calls, by index."""
        return [part for part in self.parts if isinstance(part, CallPart)]

    def push(self, event: MessageEvent) -> None:
        """Take in one more. A CallStart has its id."""
        if isinstance(event, TextPiece | ReasoningPiece):
            self._push_piece(event)
        elif isinstance(event, CallArguments):
            self._calls[event.index].arguments += event.text
        elif isinstance(event, CallEnd):
            self._calls[event.index].is_complete = True
        else:
            assert event.call_id is not None, "the answer has drawn one"
            call = self._calls[event.index] = CallPart(event.call_id, event.name)
            self.parts.append(call)

    def _push_piece(self, piece: TextPiece | ReasoningPiece) -> None:
        kind = TextPart if isinstance(piece, TextPiece) else ReasoningPart
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += piece.text
        else:
            self.parts.append(kind(piece.text))
