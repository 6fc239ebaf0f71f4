"""Rewrites an object with bare keys and marked strings as JSON, while its text arrives.

The form of Gemma 4: {city:<|"|>Rome<|"|>,days:3,tags:[<|"|>a<|"|>]}, with `quote` as its mark.
Called by the readers of calls.
"""

import re

from quire.text.parsers.reading.argument_types import ANY_ARGUMENTS
from quire.text.parsers.reading.json_copier import MAX_DEPTH, escaped
from quire.text.parsers.reading.text_source import Markers, Reader, Sink, TextSource

LOOSE_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
_BARE = re.compile(r"[^,{}\[\]<>]+")
_MAX_BARE_CHARACTERS = 1_000


def copy_loose_object(source: TextSource, quote: str, sink: Sink) -> Reader[bool]:
    """Copy the object that comes next; False: something else stands in it, or it is cut."""
    closers: list[str] = []
    is_first = True  # of its object or array
    marker = Markers([quote])
    while True:
        character = yield from source.skip_space()
        if closers and character == closers[-1] and is_first:
            pass
        else:
            if closers and closers[-1] == "}":
                if not (yield from _copy_key(source, quote, marker, sink)):
                    return False
                character = yield from source.skip_space()
            if character in ("{", "["):
                sink(source.take_to(source.at + 1))
                closers.append("}" if character == "{" else "]")
                if len(closers) > MAX_DEPTH:
                    return False
                is_first = True
                continue
            if not (yield from _copy_scalar(source, quote, marker, sink)):
                return False
        if not (yield from _copy_closers(source, closers, sink)):
            return False
        if not closers:
            return True
        is_first = False


def _copy_key(source: TextSource, quote: str, marker: Markers, sink: Sink) -> Reader[bool]:
    """A name, bare or marked as a string is, and its colon."""
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
    """A marked string, or a number, true, false, null; other bare words are strings."""
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


def _copy_closers(source: TextSource, closers: list[str], sink: Sink) -> Reader[bool]:
    while closers:
        character = yield from source.skip_space()
        if not character or character not in (",", closers[-1]):
            return False
        sink(source.take_to(source.at + 1))
        if character == ",":
            return True
        closers.pop()
    return True
