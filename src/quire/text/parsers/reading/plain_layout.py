"""Parses a message that consists of reasoning between marks, followed by text with calls.

All dialects except harmony have this layout.
"""

from collections.abc import Sequence

from quire.text.parsers.call_forms import AnswerMarks, AnyCallForm, JsonForm, PythonForm, Reasoning
from quire.text.parsers.reading.call_reader import CallOutcome, CallReader
from quire.text.parsers.reading.event_writer import EventWriter
from quire.text.parsers.reading.text_limits import TextLimits
from quire.text.parsers.reading.text_source import (
    SPACE,
    Markers,
    Reader,
    Sink,
    TextSource,
)
from quire.text.parsers.tool_use import Tool


class Pen:
    """Writes text to a sink. Holds white space back until more text follows; before a mark, the
    caller drops it."""

    __slots__ = ("_sink", "_spaces")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._spaces: list[str] = []

    def write(self, text: str) -> None:
        """Write a piece of text, which must not be empty."""
        if not self._spaces and text[-1] not in SPACE:
            self._sink(text)  # true for nearly all pieces
            return
        end = len(text.rstrip(SPACE))
        if end:
            self.flush()
            self._sink(text[:end])
        if end < len(text):
            self._spaces.append(text[end:])

    def flush(self) -> None:
        """Write the white space that was held back. Called if no mark follows."""
        for space in self.pop_space():
            self._sink(space)

    def pop_space(self) -> list[str]:
        """Remove and return the white space that was held back. Called if a mark follows."""
        spaces, self._spaces = self._spaces, []
        return spaces


class PlainReader:
    """Parses one message. White space next to a mark belongs to the mark."""

    def __init__(
        self,
        reasoning: Reasoning | None,
        forms: Sequence[AnyCallForm],
        answer: AnswerMarks | None,
        tools: tuple[Tool, ...],
        limits: TextLimits,
        source: TextSource,
        writer: EventWriter,
    ) -> None:
        self._answer_marks = (answer.begin, answer.end) if answer is not None else ()
        self._reasoning = reasoning
        self._forms: dict[str, list[AnyCallForm]] = {}
        for form in forms if tools else ():
            self._forms.setdefault(form.marker, []).append(form)
        self._source = source
        self._writer = writer
        self._calls = CallReader(source, writer, tools)
        self._limits = limits
        self._write_text = writer.write_text if limits.is_allowed else writer.drop_text
        self._text = Pen(self._write_text)
        self._thoughts = Pen(writer.write_reasoning)

    def read(self) -> Reader[None]:
        """Read to the end of the message."""
        if self._reasoning or "" in self._forms:
            yield from self._read_start()
        if not any(self._forms) and not self._answer_marks:
            self._text.flush()
            yield from self._source.read_until(Markers(()), self._write_text)
            return
        markers = Markers([*filter(None, self._forms), *self._answer_marks])
        while marker := (yield from self._source.read_until(markers, self._text.write)):
            if marker in self._answer_marks:
                self._text.pop_space()
                yield from self._source.skip_space()
            else:
                yield from self._read_calls(marker, self._text)
        self._text.flush()

    def _read_start(self) -> Reader[None]:
        """Read the reasoning at the message's start, and then calls that have no mark."""
        source = self._source
        while True:
            source.start_capture()
            character = yield from source.skip_space()
            begin = ""
            if self._reasoning:
                begin = yield from source.next_literal(self._reasoning.begin)
            if not begin:
                break
            yield from source.read_literal(begin)
            source.end_capture()
            yield from source.skip_space()
            yield from self._read_reasoning(self._reasoning)
        if character and self._form_for("", character):
            yield from self._read_calls("", self._text)
        elif self._is_cut_begin():
            source.end_capture()
            source.read_to(len(source.text))
        else:
            if space := source.end_capture():
                self._text.write(space)

    def _is_cut_begin(self) -> bool:
        """True if the text ends inside a begin mark of reasoning, after a special token of that
        mark."""
        source = self._source
        return (
            self._reasoning is not None
            and source.ends_inside(self._reasoning.begin)
            and source.text.startswith(self._limits.special_tokens, source.at)
        )

    def _read_reasoning(self, reasoning: Reasoning | None) -> Reader[None]:
        """Read the reasoning, whose begin mark has been read, up to and including its end mark."""
        assert reasoning is not None
        begins_call = [mark for mark in self._forms if mark and reasoning.is_ended_by_calls]
        markers = Markers([*reasoning.end, *begins_call])
        while True:
            marker = yield from self._source.read_until(markers, self._thoughts.write)
            if marker not in begins_call:
                break
            if (yield from self._read_calls(marker, self._thoughts)):
                return
        if marker:
            self._thoughts.pop_space()
            yield from self._source.skip_space()
        self._thoughts.flush()

    def _form_for(self, marker: str, character: str) -> AnyCallForm | None:
        """The call format with this marker whose calls can begin with `character`; None if there is
        none."""
        forms = self._forms.get(marker, ())
        for form in forms:
            if character in form.first_characters:
                return form
        return next((form for form in forms if not form.first_characters), None)

    def _read_calls(self, marker: str, pen: Pen) -> Reader[bool]:
        """Read all calls after a marker, which has been read. Returns True if there is at least one
        call.

        Text that is not a call goes to `pen` unchanged. If the text ends inside a call whose
        arguments have not begun, the whole call is dropped; otherwise only its unread rest is
        dropped.
        """
        source, writer = self._source, self._writer
        if marker:
            source.start_capture([*pen.pop_space(), marker])
        character = yield from source.skip_space()
        form = self._form_for(marker, character)
        num_calls = writer.num_calls
        outcome = CallOutcome.NONE
        if form is not None:
            outcome = yield from self._read_section(form)
        rest = source.end_capture()
        has_calls = writer.num_calls > num_calls
        is_call = has_calls or not self._may_be_text(marker, character, form)
        if outcome is CallOutcome.WHOLE:
            yield from self._skip_cut_mark()
        elif is_call and source.is_ended:
            source.read_to(len(source.text))
        elif rest:
            pen.write(rest)
        return has_calls

    def _skip_cut_mark(self) -> Reader[None]:
        """Called after a call: drop an incomplete mark of another call at the end of the text."""
        source = self._source
        marks = {
            mark.strip()
            for forms in self._forms.values()
            for form in forms
            for mark in (form.begin, form.call_begin, form.separator)
        } - {""}
        yield from source.next_literal(marks)
        if source.ends_inside(marks):
            source.read_to(len(source.text))

    def _may_be_text(self, marker: str, character: str, form: AnyCallForm | None) -> bool:
        """True if a marker and the character after it may be text, although they may begin a call
        of `form`."""
        if self._limits.differs_from_calls:
            return not marker and character not in "{["
        return not marker or (form is not None and form.needs_known_name)

    def _read_section(self, form: AnyCallForm) -> Reader[CallOutcome]:
        """Read the calls after a marker, and their end mark. Text that is still captured afterwards
        is not part of a call."""
        source = self._source
        is_array = isinstance(form, (JsonForm, PythonForm)) and (
            (yield from source.next_character()) == "["
        )
        if is_array:
            source.read_to(source.at + 1)
        call_begin = form.call_begin.split() if form.begin else ()
        if not (yield from source.read_words(call_begin)):
            return CallOutcome.NONE
        while True:
            outcome = yield from self._calls.read(form)
            if outcome is not CallOutcome.WHOLE:
                return outcome
            source.end_capture()
            yield from self._skip_words(form.call_end)
            yield from source.skip_space()
            source.start_capture()
            if not (yield from self._read_separator(form, is_array)):
                break
        source.end_capture()
        yield from self._skip_words("]" if is_array else "")
        yield from self._skip_words(form.end)
        yield from source.skip_space()
        return CallOutcome.WHOLE

    def _read_separator(self, form: AnyCallForm, is_array: bool) -> Reader[bool]:
        """Read the text between two calls. Returns False if no call follows."""
        if is_array:
            return (yield from self._source.read_literal(","))
        if form.separator.strip():
            return (yield from self._source.read_words(form.separator.split()))
        if form.begin and form.call_begin:
            return (yield from self._source.read_literal(form.call_begin.strip()))
        return False

    def _skip_words(self, mark: str) -> Reader[None]:
        """Read the words of a mark. Any word may be missing, or cut off by the end of the text."""
        source = self._source
        for word in mark.split():
            yield from source.skip_space()
            is_whole = yield from source.read_literal(word)
            if not is_whole and source.ends_inside((word,)):
                source.read_to(len(source.text))
