"""Collects the events of a parsed message, and joins adjacent pieces of one kind."""

from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)

_Piece = type[str] | type[ReasoningPiece] | type[CallArguments]


class EventWriter:
    """The events since the last `pop_events`, and the number of calls so far."""

    __slots__ = ("_events", "_kind", "_parts", "num_calls")

    def __init__(self) -> None:
        self._events: list[MessageEvent] = []
        self._kind: _Piece = str
        self._parts: list[str] = []
        self.num_calls = 0

    def write_text(self, text: str) -> None:
        """Add the next piece of the answer's text."""
        self._write(str, text)

    def drop_text(self, text: str) -> None:
        """Ignore text; used in place of `write_text` if the message may not have text."""

    def write_reasoning(self, text: str) -> None:
        """Add the next piece of the reasoning."""
        self._write(ReasoningPiece, text)

    def start_call(self, name: str, call_id: str | None) -> None:
        """Begin the next call."""
        self._close_piece()
        self._events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1

    def write_arguments(self, text: str) -> None:
        """Add the next piece of the current call's arguments."""
        self._write(CallArguments, text)

    def end_call(self) -> None:
        """End the current call."""
        self._close_piece()
        self._events.append(CallEnd(self.num_calls - 1))

    def pop_events(self) -> list[MessageEvent]:
        """Remove and return the events collected so far."""
        self._close_piece()
        events, self._events = self._events, []
        return events

    def _write(self, kind: _Piece, text: str) -> None:
        if kind is not self._kind:
            self._close_piece()
            self._kind = kind
        if text:
            self._parts.append(text)

    def _close_piece(self) -> None:
        if not self._parts:
            return
        text = self._parts[0] if len(self._parts) == 1 else "".join(self._parts)
        self._parts = []
        if self._kind is CallArguments:
            self._events.append(CallArguments(self.num_calls - 1, text))
        elif self._kind is ReasoningPiece:
            self._events.append(ReasoningPiece(text))
        else:
            self._events.append(text)
