"""Parses a generated answer in the harmony format, in which each part names its channel.

An answer consists of several messages, for example:
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>. The text for the user is in the channel `final`.
"""

import re

from quire.text.parsers.call_forms import ChannelForm
from quire.text.parsers.reading.event_writer import EventWriter
from quire.text.parsers.reading.json_copier import copy_value
from quire.text.parsers.reading.text_limits import TextLimits
from quire.text.parsers.reading.text_source import Markers, Reader, TextSource
from quire.text.parsers.tool_use import Tool

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_WORD = re.compile(r"\s*([^\s<]*)")


class ChannelReader:
    """Parses one answer, which begins after the role of its first message."""

    def __init__(
        self,
        form: ChannelForm,
        tools: tuple[Tool, ...],
        limits: TextLimits,
        source: TextSource,
        writer: EventWriter,
    ) -> None:
        self._form = form
        self._has_tools = bool(tools)
        self._source = source
        self._writer = writer
        # For text outside the bodies of messages.
        self._write_text = writer.write_text if limits.is_allowed else writer.drop_text
        self._header_end = Markers([form.message])
        self._body_ends = Markers([*form.ends, form.start, form.channel])

    def read(self) -> Reader[None]:
        """Read to the end of the message."""
        form, source = self._form, self._source
        end = form.start
        while end or not source.is_ended:
            pieces = [] if end != form.channel else [end]
            header = yield from self._read_header(pieces)
            if header is not None:
                end = yield from self._read_body(header)
            else:
                end = yield from source.read_until(self._body_ends, self._write_text)
            if end in form.ends:
                yield from source.skip_space()
                if (yield from source.read_literal(form.start)):
                    end = form.start
            if end == form.start:
                is_whole = yield from source.read_literal(form.role)
                if not is_whole and source.is_ended:
                    source.read_to(len(source.text))  # the role was cut off

    def _read_header(self, pieces: list[str]) -> Reader[str | None]:
        """Read a message's header up to its body. Returns None if the header is missing or cut
        off."""
        form, source = self._form, self._source
        if not pieces:
            source.start_capture()
            yield from source.skip_space()
            starts = (form.channel, form.constrain, form.message, form.recipient)
            if not (yield from source.next_literal(starts)):
                self._write_text(source.end_capture())
                return None
            source.end_capture()
        if not (yield from source.read_until(self._header_end, pieces.append)):
            return None  # the header was cut off
        return "".join(pieces)

    def _read_body(self, header: str) -> Reader[str]:
        """Read a message's body and the mark after it; returns the mark."""
        form, source = self._form, self._source
        channel = self._channel(header)
        found = _RECIPIENT.search(header)
        recipient = found.group(1) if found else ""
        write = self._writer.write_text
        if self._has_tools and recipient.startswith(form.call_prefix):
            write = self._write_text
            yield from self._read_call(recipient.removeprefix(form.call_prefix))
        elif channel == form.reasoning_channel:
            write = self._writer.write_reasoning
        return (yield from source.read_until(self._body_ends, write))

    def _channel(self, header: str) -> str:
        _, mark, rest = header.partition(self._form.channel)
        found = _WORD.match(rest)
        return found.group(1) if mark and found else ""

    def _read_call(self, name: str) -> Reader[None]:
        """Read a call's arguments if an object follows; otherwise the caller reads the text."""
        form, source, writer = self._form, self._source, self._writer
        source.start_capture()
        if (yield from source.skip_space()) != "{" or not name:
            self._write_text(source.end_capture())
            return
        source.end_capture()
        writer.start_call(name, None)
        if (yield from copy_value(source, writer.write_arguments)):
            writer.end_call()
            yield from source.skip_space()
            yield from source.next_literal(form.ends)
            if source.ends_inside(form.ends):
                source.read_to(len(source.text))
        elif source.is_ended:
            source.read_to(len(source.text))  # the arguments were cut off
