"""Converts streamed objects with unquoted keys and specially quoted strings to JSON.

Gemma 4 writes {city:<|"|>Rome<|"|>,days:3,tags:[<|"|>a<|"|>]}; here `quote` is <|"|>. Called by the
parsers of tool calls.
"""

import re

from quire.text.parsers.reading.argument_types import ANY_ARGUMENTS
from quire.text.parsers.reading.json_copier import copy_nested, escaped
from quire.text.parsers.reading.text_source import Markers, Reader, Sink, TextSource

LOOSE_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
_BARE = re.compile(r"[^,{}\[\]<>]+")
_MAX_BARE_CHARACTERS = 1_000


def copy_loose_object(source: TextSource, quote: str, sink: Sink) -> Reader[bool]:
    """Read the next object and write it as JSON. Returns False if it is malformed or cut off."""
    marker = Markers([quote])
    return (
        yield from copy_nested(
            source,
            sink,
            next_character=source.skip_space,
            copy_key=lambda: _copy_key(source, quote, marker, sink),
            copy_scalar=lambda _: _copy_scalar(source, quote, marker, sink),
        )
    )


def _copy_key(source: TextSource, quote: str, marker: Markers, sink: Sink) -> Reader[bool]:
    """Copy a key, with or without `quote`, and its colon."""
    pieces: list[str] = []
    if (yield from source.read_literal(quote)):
        if not (yield from source.read_until(marker, pieces.append)):
            return False
    else:
        pieces.append((yield from source.read_match(LOOSE_KEY, _MAX_BARE_CHARACTERS)))
        if not pieces[0]:
            return False
    if not (yield from source.read_words(":")):
        return False
    sink(f'"{escaped("".join(pieces))}":')
    return True


def _copy_scalar(source: TextSource, quote: str, marker: Markers, sink: Sink) -> Reader[bool]:
    """Copy a string in `quote`s, a number, true, false or null. Other unquoted words become
    strings."""
    if (yield from source.read_literal(quote)):
        sink('"')
        is_whole = yield from source.read_until(marker, lambda piece: sink(escaped(piece)))
        sink('"' if is_whole else "")
        return bool(is_whole)
    bare = yield from source.read_match(_BARE, _MAX_BARE_CHARACTERS)
    if not bare or ((yield from source.next_character()) == "" and source.is_ended):
        return False
    sink(ANY_ARGUMENTS.as_json("", bare.strip()))
    return True
