"""An assistant's message, put together from parsed events.

Its parts are in the order of arrival. Independent of any API's form of a message.
"""

from dataclasses import dataclass
from typing import TypeAlias

from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    MessageEvent,
    ReasoningPiece,
)


@dataclass(slots=True)
class TextPart:
    """A part of the answer's text."""

    text: str


@dataclass(slots=True)
class ReasoningPart:
    """A part of the model's reasoning."""

    text: str


@dataclass(slots=True)
class CallPart:
    """A tool call."""

    call_id: str
    name: str
    #: The arguments as JSON, or the beginning of the JSON if `is_complete` is false.
    arguments: str = ""
    is_complete: bool = False


MessagePart: TypeAlias = TextPart | ReasoningPart | CallPart


class CollectedMessage:
    """The message from the events so far.

    Invariant: adjacent pieces of text are merged into one part, and so are pieces of reasoning.
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
        """All reasoning of the answer."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """The tool calls, by index."""
        return [part for part in self.parts if isinstance(part, CallPart)]

    def push(self, event: MessageEvent) -> None:
        """Add an event. A CallStart must have a call id."""
        if isinstance(event, str):
            self._push_piece(TextPart, event)
        elif isinstance(event, ReasoningPiece):
            self._push_piece(ReasoningPart, event.text)
        elif isinstance(event, CallArguments):
            self._calls[event.index].arguments += event.text
        elif isinstance(event, CallEnd):
            self._calls[event.index].is_complete = True
        else:
            assert event.call_id is not None, "`ChatAnswer` has set one"
            call = self._calls[event.index] = CallPart(event.call_id, event.name)
            self.parts.append(call)

    def _push_piece(self, kind: type[TextPart] | type[ReasoningPart], text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += text
        else:
            self.parts.append(kind(text))
