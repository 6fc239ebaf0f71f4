"""Events of a generated message: pieces of text and reasoning, and tool calls.

All APIs render this one internal stream of events. Plain data.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    #: The call's index in its message, from 0.
    index: int
    name: str
    #: The id, if the model writes ids; None if the server is to make one.
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: a piece of the text of one JSON object, never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are complete. A call cut off by max_tokens has no such event."""

    index: int


MessageEvent: TypeAlias = TextPiece | ReasoningPiece | CallStart | CallArguments | CallEnd
