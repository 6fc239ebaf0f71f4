"""Converts the streamed arguments of a Python call to a JSON object.

Called by the parsers of calls.
"""

import ast
import json
import re
from typing import Any

from quire.text.parsers.reading.json_copier import escaped
from quire.text.parsers.reading.text_source import Reader, Sink, TextSource

KEYWORD = re.compile(r"[^\W\d]\w*")
_IN_STRING = re.compile(r"[^'\"\\]+")
_PLAIN = re.compile(r"[^'\"()\[\]{},\\]+")
_MAX_NAME_CHARACTERS = 256
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 50
_ESCAPES = "\n\\'\"abfnrtvxuUN0"
_JSON_WORDS = {"true": True, "false": False, "null": None}


def copy_python_arguments(source: TextSource, sink: Sink) -> Reader[bool]:
    """Read `(name=value, ...)` and write each argument as JSON when it is complete. Returns False
    if the text is malformed or cut off."""
    yield from source.read_literal("(")
    sink("{")
    before_key = ""
    while (yield from source.skip_space()) != ")":
        source.start_capture()
        name = yield from source.read_match(KEYWORD, _MAX_NAME_CHARACTERS)
        if not name or not (yield from source.read_words("=")):
            return False
        value = yield from _read_value(source)
        if value is None:
            return False
        source.end_capture()
        sink(f'{before_key}"{escaped(name)}": {value}')
        before_key = ", "
        if not (yield from source.read_literal(",")) and (yield from source.skip_space()) != ")":
            return False
    source.read_to(source.at + 1)
    sink("}")
    return True


def _read_value(source: TextSource) -> Reader[str | None]:
    """Read a Python literal up to the comma or parenthesis after it. Returns its JSON text; None if
    it is invalid."""
    pieces: list[str] = []
    closers: list[str] = []
    while True:
        character = yield from source.next_character()
        if not character:
            return None
        if not closers and character in ",)":
            return _as_json("".join(pieces).strip())
        if character in "'\"":
            if not (yield from _read_string(source, pieces)):
                return None
        elif plain := _PLAIN.match(source.text, source.at):
            pieces.append(source.read_to(plain.end()))
        else:
            if character in _CLOSERS:
                closers.append(_CLOSERS[character])
            elif character in ")]}" and (not closers or closers.pop() != character):
                return None
            if len(closers) > _MAX_DEPTH:
                return None
            pieces.append(source.read_to(source.at + 1))


def _read_string(source: TextSource, pieces: list[str]) -> Reader[bool]:
    """Read a string in single, double or triple quotes. Returns False if it is cut off."""
    quote = yield from source.next_character()
    mark = (yield from source.next_literal((quote * 3,))) or quote
    pieces.append(source.read_to(source.at + len(mark)))
    while not (yield from source.read_literal(mark)):
        character = yield from source.next_character()
        if not character:
            return False
        if plain := _IN_STRING.match(source.text, source.at):
            pieces.append(source.read_to(plain.end()))
            continue
        pieces.append(source.read_to(source.at + 1))
        if character == "\\":
            escaped_character = yield from source.next_character()
            if not escaped_character:
                return False
            # Double the backslash of an unknown escape. Python would keep the backslash, but warn.
            pieces.append("" if escaped_character in _ESCAPES else "\\")
            pieces.append(source.read_to(source.at + 1))
    pieces.append(mark)
    return True


def _as_json(text: str) -> str | None:
    if text in _JSON_WORDS:
        return text
    try:
        value: Any = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
