"""Copies one JSON value from streamed text, and checks its syntax.

The output so far can always be continued to valid JSON. Unescaped control characters in strings, a
mistake of some models, are escaped. Called by the parsers of calls.
"""

import re
from collections.abc import Callable

from quire.text.parsers.reading.text_source import Reader, Sink, TextSource

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CONTROL_NAMES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\b": r"\b", "\f": r"\f"}
_MAX_SCALAR_CHARACTERS = 4_300  # of a number; Python also refuses more digits
_MAX_DEPTH = 200


def escaped(text: str) -> str:
    """The text with the escapes that it needs inside a JSON string."""
    if _PLAIN.fullmatch(text) or not text:
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return _CONTROL.sub(_escaped_control, text)


def _escaped_control(found: re.Match[str]) -> str:
    character = found.group()
    return _CONTROL_NAMES.get(character) or f"\\u{ord(character):04x}"


def copy_string(source: TextSource, sink: Sink) -> Reader[bool]:
    """Copy a string with its quotes. Returns False if the text is not a valid string or ends inside
    it.

    If it returns False, the text up to the first wrong character has been copied.
    """
    if (yield from source.next_character()) != '"':
        return False
    sink(source.read_to(source.at + 1))
    while True:
        character = yield from source.next_character()
        if character == '"':
            sink(source.read_to(source.at + 1))
            return True
        if character == "\\":
            if not (yield from _copy_escape(source, sink)):
                return False
        elif character == "":
            return False
        elif found := _PLAIN.match(source.text, source.at):
            sink(source.read_to(found.end()))
        else:
            sink(escaped(source.read_to(source.at + 1)))


def _copy_escape(source: TextSource, sink: Sink) -> Reader[bool]:
    while (found := _ESCAPE.match(source.text, source.at)) is None:
        if source.is_ended or not _ESCAPE_START.match(source.text, source.at):
            return False
        yield
    sink(source.read_to(found.end()))
    return True


def _copy_scalar(source: TextSource, sink: Sink) -> Reader[bool]:
    """Copy a number, true, false or null. Returns False, and reads nothing, if there is none."""
    while True:
        found = _SCALAR.match(source.text, source.at)
        if found is None or found.end() - source.at > _MAX_SCALAR_CHARACTERS:
            return False
        if found.end() < len(source.text) or source.is_ended:
            break
        yield
    if not _WHOLE_SCALAR.fullmatch(found.group()):
        return False
    sink(source.read_to(found.end()))
    return True


def copy_value(source: TextSource, sink: Sink) -> Reader[bool]:
    """Copy a value without the white space before it. Returns False if it is malformed or cut
    off."""
    yield from source.skip_space()

    def copy_scalar(character: str) -> Reader[bool]:
        return (copy_string if character == '"' else _copy_scalar)(source, sink)

    return (
        yield from copy_nested(
            source,
            sink,
            next_character=lambda: _copy_space(source, sink),
            copy_key=lambda: _copy_key(source, sink),
            copy_scalar=copy_scalar,
        )
    )


def copy_nested(
    source: TextSource,
    sink: Sink,
    *,
    next_character: Callable[[], Reader[str]],
    copy_key: Callable[[], Reader[bool]],
    copy_scalar: Callable[[str], Reader[bool]],
) -> Reader[bool]:
    """Copy a value: an object, an array or a scalar. Returns False if it is malformed or cut off.

    `next_character` skips white space and returns the next character, unread. `copy_key` copies a
    member's name and its colon. `copy_scalar` copies a scalar that begins with the given character.
    """
    # The closing brackets of all open objects and arrays, innermost last.
    closers: list[str] = []
    is_opened = False  # True directly after an opening bracket, which may be closed at once
    while True:
        # Copy the key, if in an object, and then the value's opening bracket or the scalar.
        character = yield from next_character()
        if not is_opened or character != closers[-1]:
            if closers and closers[-1] == "}":
                if not (yield from copy_key()):
                    return False
                character = yield from next_character()
            if character in ("{", "["):
                sink(source.read_to(source.at + 1))
                closers.append("}" if character == "{" else "]")
                if len(closers) > _MAX_DEPTH:
                    return False
                is_opened = True
                continue
            if not (yield from copy_scalar(character)):
                return False
        # After a value, close brackets up to a comma.
        is_opened = False
        while closers:
            character = yield from next_character()
            if not character or character not in (",", closers[-1]):
                return False
            sink(source.read_to(source.at + 1))
            if character == ",":
                break
            closers.pop()
        else:
            return True


def _copy_key(source: TextSource, sink: Sink) -> Reader[bool]:
    """Copy a member's name and its colon."""
    if not (yield from copy_string(source, sink)):
        return False
    if (yield from _copy_space(source, sink)) != ":":
        return False
    sink(source.read_to(source.at + 1))
    return True


def _copy_space(source: TextSource, sink: Sink) -> Reader[str]:
    """Copy white space. Returns the next character without reading it; "" at the end."""
    while True:
        character = yield from source.next_character()
        if character == "" or character not in " \t\r\n":
            return character
        end = source.at + 1
        while end < len(source.text) and source.text[end] in " \t\r\n":
            end += 1
        sink(source.read_to(end))
