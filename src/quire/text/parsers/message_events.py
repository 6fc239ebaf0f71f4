"""What a generated text means, piece by piece: text, reasoning, tool calls.

The one internal stream of events that every API renders. Plain data.
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
    """A tool call begins. index: 0 for the first of a message, and so on.

    call_id: where the model writes ids itself; None: the server draws one.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: a piece of one JSON object's text; never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are complete. A call that max_tokens cut off has no end."""

    index: int


MessageEvent: TypeAlias = TextPiece | ReasoningPiece | CallStart | CallArguments | CallEnd
