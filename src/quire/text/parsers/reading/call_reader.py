"""Parses one tool call incrementally, in each call format of the dialects.

A `CallStart` event is written when the arguments of a call begin. If the text before the arguments
is malformed, it is not a call. Called by the message parser, which finds where a call may begin.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from quire.text.parsers.call_forms import (
    AnyCallForm,
    JsonForm,
    LooseForm,
    NamedForm,
    PythonForm,
    TaggedForm,
)
from quire.text.parsers.reading.argument_types import ANY_ARGUMENTS, ArgumentTypes, is_object
from quire.text.parsers.reading.event_writer import EventWriter
from quire.text.parsers.reading.json_copier import copy_string, copy_value, escaped
from quire.text.parsers.reading.loose_objects import copy_loose_object
from quire.text.parsers.reading.python_calls import copy_python_arguments
from quire.text.parsers.reading.text_source import Markers, Reader, Sink, TextSource
from quire.text.parsers.tool_use import Tool

NAME = re.compile(r"[^\s<>{}\[\]()\"'`=|,;]+")
PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*")
_MAX_NAME_CHARACTERS = 256


class CallOutcome(Enum):
    """The result of reading a call."""

    NONE = "the text is not a call"
    WHOLE = "a complete call"
    BROKEN = "a call that began, but is cut off or malformed"


class CallReader:
    """Parses calls from `source` and writes their events to `writer`. `tools` gives names and
    schemas."""

    def __init__(self, source: TextSource, writer: EventWriter, tools: tuple[Tool, ...]) -> None:
        self._source = source
        self._writer = writer
        self._types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}

    def read(self, form: AnyCallForm) -> Reader[CallOutcome]:
        """Parse one call, whose call_begin mark has been read. The source captures the text until
        the CallStart event, so that the caller can treat it as text if it is not a call."""
        if isinstance(form, JsonForm):
            return (yield from self._read_json(form))
        if isinstance(form, NamedForm):
            return (yield from self._read_named(form))
        if isinstance(form, TaggedForm):
            return (yield from self._read_tagged(form))
        if isinstance(form, LooseForm):
            return (yield from self._read_loose(form))
        return (yield from self._read_python(form))

    def _start(self, form: AnyCallForm, name: str, call_id: str | None = None) -> bool:
        """Write the CallStart event. Returns False, and writes nothing, if the name is empty, or if
        the format requires the name of a tool and there is no such tool."""
        is_known = name in self._types
        if not name or ((form.needs_known_name or not form.marker) and not is_known):
            return False
        self._source.end_capture()
        self._writer.start_call(name, call_id)
        return True

    def _end(self, is_whole: bool) -> CallOutcome:
        if not is_whole:
            return CallOutcome.BROKEN
        self._writer.end_call()
        return CallOutcome.WHOLE

    # A JSON object with name and arguments.

    def _read_json(self, form: JsonForm) -> Reader[CallOutcome]:
        """Parse a JSON object with its members in any order; members with unknown names are
        ignored."""
        source = self._source
        if not (yield from source.read_words("{")):
            return CallOutcome.NONE
        members = _Members()
        character = yield from source.skip_space()
        # "}" may follow "{" directly, but not after a comma.
        while character != "}" or not members.is_empty:
            if not (yield from self._read_member(form, members)):
                return members.outcome_if_malformed
            character = yield from source.skip_space()
            if character == "}":
                break
            if character != ",":
                return members.outcome_if_malformed
            source.read_to(source.at + 1)
        if not members.is_started:
            if not self._start(form, members.name, members.call_id):
                return CallOutcome.NONE
            self._writer.write_arguments(members.arguments or "{}")
            self._writer.end_call()
        source.read_to(source.at + 1)
        return CallOutcome.WHOLE

    def _read_member(self, form: JsonForm, members: "_Members") -> Reader[bool]:
        source = self._source
        key = yield from self._read_string()
        if key is None or not (yield from source.read_words(":")):
            return False
        members.is_empty = False
        if key == form.name_key:
            is_second = bool(members.name)
            members.name = (yield from self._read_string()) or ""
            return bool(members.name) and not is_second
        if key in form.arguments_keys:
            if members.is_started or members.arguments is not None:
                return False
            return (yield from self._read_arguments(form, members))
        pieces: list[str] = []
        if not (yield from copy_value(source, pieces.append)):
            return False
        if key == "id":
            value = json.loads("".join(pieces))
            members.call_id = value if isinstance(value, str) and value else None
        return True

    def _read_arguments(self, form: JsonForm, members: "_Members") -> Reader[bool]:
        """Parse the arguments. They are written piece by piece if the name came before them;
        otherwise they are stored in `members`."""
        source = self._source
        if (yield from source.skip_space()) != "{":
            members.arguments = yield from self._read_other_arguments()
            return members.arguments is not None
        if not members.name:
            pieces: list[str] = []
            is_whole = yield from copy_value(source, pieces.append)
            members.arguments = "".join(pieces)
            return is_whole
        if not self._start(form, members.name, members.call_id):
            return False
        members.is_started = True
        if not (yield from copy_value(source, self._writer.write_arguments)):
            return False
        members.is_whole = True
        self._writer.end_call()
        return True

    def _read_other_arguments(self) -> Reader[str | None]:
        """Parse arguments that are not an object: null (no arguments), or a string that contains
        the JSON of an object."""
        pieces: list[str] = []
        if not (yield from copy_value(self._source, pieces.append)):
            return None
        value = json.loads("".join(pieces))
        if value is None:
            return "{}"
        return value if isinstance(value, str) and is_object(value) else None

    def _read_string(self) -> Reader[str | None]:
        pieces: list[str] = []
        yield from self._source.skip_space()
        if not (yield from copy_string(self._source, pieces.append)):
            return None
        value: str = json.loads("".join(pieces))
        return value

    # A name and a JSON object.

    def _read_named(self, form: NamedForm) -> Reader[CallOutcome]:
        source = self._source
        yield from source.skip_space()
        if form.name_prefix:
            yield from source.read_literal(form.name_prefix)
        name = yield from source.read_match(NAME, _MAX_NAME_CHARACTERS)
        call_id = None
        if form.id_begin and (yield from source.read_literal(form.id_begin)):
            call_id = yield from source.read_match(NAME, _MAX_NAME_CHARACTERS)
        if not name or not (yield from source.read_words(form.name_end.split())):
            return CallOutcome.NONE
        if (yield from source.skip_space()) != "{" or not self._start(form, name, call_id or None):
            return CallOutcome.NONE
        return self._end((yield from copy_value(source, self._writer.write_arguments)))

    # A name, and each argument between marks.

    def _read_tagged(self, form: TaggedForm) -> Reader[CallOutcome]:
        source, writer = self._source, self._writer
        yield from source.skip_space()
        name = yield from source.read_match(NAME, _MAX_NAME_CHARACTERS)
        if not name or not (yield from source.read_words(form.name_end.split())):
            return CallOutcome.NONE
        marks = tuple(mark for mark in (form.parameter_begin, form.call_end, form.end) if mark)
        yield from source.skip_space()
        mark = yield from source.next_literal(marks)
        if not mark or not self._start(form, name):
            return CallOutcome.NONE
        before_key = "{"
        while mark == form.parameter_begin:
            source.start_capture()
            yield from source.read_literal(mark)
            if not (yield from self._read_parameter(form, name, before_key)):
                return CallOutcome.BROKEN
            before_key = ", "
            yield from source.skip_space()
            mark = yield from source.next_literal(marks)
        if not mark:
            return CallOutcome.BROKEN
        writer.write_arguments("{}" if before_key == "{" else "}")
        return self._end(True)

    def _read_parameter(self, form: TaggedForm, name: str, before_key: str) -> Reader[bool]:
        """Parse one argument. A string is written piece by piece, other types when they are
        complete."""
        source, write = self._source, self._writer.write_arguments
        first, *others = form.key_end.split()
        pieces: list[str] = []
        if not (yield from source.read_until(_markers(first), pieces.append)):
            return False
        if not (yield from source.read_words(others)):
            return False
        key = "".join(pieces).strip()
        mark = form.parameter_end.strip()
        ends = _markers(mark, form.value_space + mark)
        if form.value_space:
            yield from source.read_literal(form.value_space)
        types = self._types.get(name, ANY_ARGUMENTS)
        write(f'{before_key}"{escaped(key)}": ')
        source.end_capture()
        if types.is_text(key):
            write('"')
            is_whole = yield from source.read_until(ends, lambda piece: write(escaped(piece)))
            write('"' if is_whole else "")
            return bool(is_whole)
        pieces.clear()
        is_json = "string" not in types.of(key) and (
            yield from self._read_json_before(mark, pieces.append)
        )
        if not is_json and not (yield from source.read_until(ends, pieces.append)):
            return False
        write(types.as_json(key, "".join(pieces)))
        return True

    def _read_json_before(self, mark: str, sink: Sink) -> Reader[bool]:
        """Read a JSON value and the mark after it. Strings in the value may contain the mark.

        Returns False and reads nothing if the text is not JSON followed by the mark.
        """
        source = self._source
        source.start_capture()
        is_whole = yield from copy_value(source, lambda piece: None)
        value = source.end_capture()
        source.start_capture()
        if is_whole and (yield from source.read_words((mark,))):
            source.end_capture()
            sink(value)
            return True
        source.unread(value + source.end_capture())
        return False

    # A name and an object with bare keys, or a Python function.

    def _read_loose(self, form: LooseForm) -> Reader[CallOutcome]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.read_match(NAME, _MAX_NAME_CHARACTERS)
        if (yield from source.skip_space()) != "{" or not self._start(form, name):
            return CallOutcome.NONE
        return self._end(
            (yield from copy_loose_object(source, form.quote, self._writer.write_arguments))
        )

    def _read_python(self, form: PythonForm) -> Reader[CallOutcome]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.read_match(PYTHON_NAME, _MAX_NAME_CHARACTERS)
        if (yield from source.skip_space()) != "(" or not self._start(form, name):
            return CallOutcome.NONE
        return self._end((yield from copy_python_arguments(source, self._writer.write_arguments)))


@dataclass
class _Members:
    """The members of a call's JSON object that have been read so far."""

    #: The tool's name; "" if it has not been read yet.
    name: str = ""
    call_id: str | None = None
    #: The JSON text of the arguments if they came before the name; otherwise None.
    arguments: str | None = None
    is_empty: bool = True
    #: True if the CallStart event has been written.
    is_started: bool = False
    #: True if the CallEnd event has been written.
    is_whole: bool = False

    @property
    def outcome_if_malformed(self) -> CallOutcome:
        """The outcome if the rest of the object is malformed. A call with complete arguments still
        counts as whole."""
        if self.is_whole:
            return CallOutcome.WHOLE
        return CallOutcome.BROKEN if self.is_started else CallOutcome.NONE


@lru_cache(maxsize=64)
def _markers(*literals: str) -> Markers:
    return Markers(literals)
