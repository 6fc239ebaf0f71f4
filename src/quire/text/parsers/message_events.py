"""Events of a generated message: pieces of text, pieces of reasoning, and tool calls.

Parsers produce this stream of events, and every API converts it to its own format.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next piece of the reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    #: The call's index in its message, from 0.
    index: int
    name: str
    #: The call's id if the model writes ids; None if the server has to make one.
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; never empty. All pieces of a call form one JSON
    object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are complete. A call that max_tokens cuts off has no CallEnd."""

    index: int


MessageEvent: TypeAlias = str | ReasoningPiece | CallStart | CallArguments | CallEnd
"""A `str` is the next piece of the answer's text; never empty."""
