"""Turns the text of a message, as it is generated, into text, reasoning and tool calls.

Law: the events of a text, adjacent pieces of one kind joined, do not depend on how it was cut
into pieces. What is no call and no mark comes out as text (or reasoning, where it stood in that),
character by character, white space beside marks aside. Called by what answers requests.
"""

from collections.abc import Callable
from typing import TypeAlias

from quire.text.parsers.message_events import MessageEvent
from quire.text.parsers.reading.event_writer import EventWriter
from quire.text.parsers.reading.text_source import Reader, TextSource

Layout: TypeAlias = Callable[[TextSource, EventWriter], Reader[None]]


class MessageParser:
    """The parser of one message. It holds back no more than may turn out to be a mark."""

    __slots__ = ("_is_ended", "_reader", "_source", "_writer")

    def __init__(self, layout: Layout, already_written: str = "") -> None:
        """already_written: what the prompt has of the message; it makes no events."""
        self._source = TextSource()
        self._writer = EventWriter()
        self._reader = layout(self._source, self._writer)
        self._is_ended = False
        next(self._reader)
        if already_written:
            self.push(already_written)

    def push(self, text: str) -> list[MessageEvent]:
        """The events of more text."""
        assert not self._is_ended, "text was pushed behind the end"
        if text:
            self._source.push(text)
            next(self._reader)
        return self._writer.take()

    def finish(self) -> list[MessageEvent]:
        """The events of what was held back; the message ends here."""
        assert not self._is_ended, "a message ends once"
        self._is_ended = self._source.is_ended = True
        next(self._reader, None)
        return self._writer.take()
