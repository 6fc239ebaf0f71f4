"""Parses the JSON of a request body: strictly, and in pieces if it is long.

If an object has a name twice, Python keeps the last value, while a proxy that checks calls may read
the first. Python also accepts unpaired surrogates, which are not valid characters. Duplicate names
and unpaired surrogates are refused, at any depth, by an error that names the field.

`json.loads` is one call in C that blocks the process: a tenth of a second for 8 MiB of numbers or
small lists, and longer for long integers. So long bodies are parsed in pieces, and their bounds
(`MAX_VALUES` and others) are checked before values are built. Patterns find runs of simple values
(numbers, short texts, small flat lists and objects), and `json` parses one run per call; nesting
and long texts are read step by step.
"""

import json
import json.decoder
import re
from collections.abc import Generator
from itertools import islice
from typing import Any

from quire.errors import InvalidRequestError, check_characters

LONG_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in pieces; between two pieces the event loop serves other calls."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The JSON escape of half a surrogate pair. Surrogates only occur as escapes, since the body is
valid UTF-8."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_BYTE_ORDER_MARK = "\ufeff"

_VALUES_AT_ONCE = 1000
"""Number of values that are checked between two pauses. This takes less than 0.1 ms."""

Path = tuple["Path", str | int] | None
"""The place of a value: the path of the list or object that contains it, and its name or index
in it. The outermost value has the path None."""

MAX_VALUES = 2_000_000
MAX_PARTS = 200_000
"""The bounds of a body: MAX_VALUES values of any kind, and MAX_PARTS lists, objects and fields of
objects together. Bodies without lists of token ids have a lower bound than MAX_VALUES."""

MAX_NUMBER_CHARACTERS = 400
"""Maximum length of a number, enough for the largest double without exponent. The time to parse an
integer grows with the square of its length."""

MAX_DEPTH = 900
"""Maximum nesting of lists and objects. Python's recursive `json` functions allow about as much."""

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_NUMBER_CHARACTERS + 1}}}")

_SPACE = r"[ \t\n\r]{0,64}+"
_NUMBER_TEXT = r"[0-9]{1,40}+(?:\.[0-9]{1,40}+)?+(?:[eE][-+]?[0-9]{1,40}+)?+"
_SCALAR = rf"(?:-?(?:{_NUMBER_TEXT}|Infinity)|NaN|true|false|null)"
"""Infinity and NaN are not JSON, but Python accepts them; field validation refuses them later."""

_PLAIN = r'[^"\\\x00-\x1f]{0,256}+'
_TEXT = rf'"{_PLAIN}(?:\\.{_PLAIN}){{0,16}}+"'
_SIMPLE = rf"(?>{_SCALAR}|{_TEXT})"
_FIELD = rf"{_TEXT}{_SPACE}:{_SPACE}{_SIMPLE}"


def _run(value: str, count: int) -> str:
    """A pattern that matches 1 to `count` values, each followed by a comma."""
    return rf"(?>(?:{_SPACE}{value}{_SPACE},){{1,{count}}}+)"


def _flat(opening: str, value: str, closing: str) -> str:
    some = rf"(?:{_SPACE}{value}{_SPACE},){{0,15}}+{_SPACE}{value}"
    return rf"{opening}(?:{some})?+{_SPACE}{closing}"


_FLAT_LIST = _flat(r"\[", _SIMPLE, "]")
_FLAT_OBJECT = _flat("{", _FIELD, "}")
_ITEM = f"(?>{_SIMPLE}|{_FLAT_LIST}|{_FLAT_OBJECT})"
_SCALARS = re.compile(_run(_SCALAR, 1024))
_ITEMS = re.compile(_run(_ITEM, 64))
_FIELDS = re.compile(_run(rf"{_TEXT}{_SPACE}:{_SPACE}{_ITEM}", 64))
_SPACES = re.compile(r"[ \t\n\r]{0,1000000}+")
_NUMBER = re.compile(r"[-+.0-9eE]*+")


def parse(body: bytes, max_values: int = MAX_VALUES) -> Generator[None, None, Any]:
    """Parse the JSON value in `body`; the caller may pause at every yield.

    A short body is parsed in one step. `max_values` bounds the values of a long body; the values of
    short bodies aren't counted. Raises json.JSONDecodeError, UnicodeDecodeError for bytes that are
    not UTF-8, and InvalidRequestError for a duplicate name in an object, for an unpaired surrogate,
    and for a body that exceeds the module's bounds.
    """
    text = str(body, "utf-8").removeprefix(_BYTE_ORDER_MARK)
    if len(body) > LONG_BODY_BYTES or _LONG_NUMBER.search(text):
        value = yield from parse_in_pieces(text, max_values)
    else:
        value = _DECODER.decode(text)
    if isinstance(value, (dict, list)) and _HALF.search(text):
        yield from _check_texts(value)
    return value


def parse_in_pieces(text: str, max_values: int = MAX_VALUES) -> Generator[None, None, Any]:
    """Parse the JSON value in `text`, with a yield every few microseconds.

    A long string is read in one step, at a millisecond per MB. Raises json.JSONDecodeError, and
    InvalidRequestError for a duplicate name in an object and for a text that exceeds the bounds.
    """
    reader = _Reader(text, max_values)
    while reader.step():
        yield
    return reader.root[0]


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these fields. Raises InvalidRequestError if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise _duplicate_field(name)
            names.add(name)
    return found


def _duplicate_field(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the body has the field {name!r:.80} twice in one object; give it once", name
    )


_DECODER = json.JSONDecoder(object_pairs_hook=unique_fields)
_scan_once: Any = _DECODER.scan_once  # type: ignore[attr-defined]
_read_text: Any = json.decoder.scanstring  # type: ignore[attr-defined]


class _Reader:
    """Parses a text step by step.

    Invariant: everything before `_at` is in `root`, or in the open lists and objects of `_outer`
    and `_inner`.
    """

    def __init__(self, text: str, max_values: int) -> None:
        self.root: list[Any] = []
        self._text = text
        self._max_values = max_values
        self._at = 0
        self._num_values = 0
        self._num_parts = 0
        #: The open lists and objects around the innermost one, each with the name of the field
        #: whose value is being read.
        self._outer: list[tuple[Any, str]] = []
        #: The innermost open list or object.
        self._inner: list[Any] | dict[str, Any] = self.root
        self._name = ""
        #: `_may_begin`: whether a value or field may begin at `_at`, as after an opening bracket or
        #: a comma. `_may_end`: whether the innermost list or object may end there, as after its
        #: opening bracket or a value.
        self._may_begin, self._may_end = True, False

    def step(self) -> bool:
        """Read a little more; returns whether there is more to read."""
        sign = self._next_sign()
        if sign in (" ", "\n", "\r", "\t"):
            return True  # a run of spaces may be long, so pause here
        if self._inner is self.root and self.root:
            if sign:
                raise json.JSONDecodeError("Extra data", self._text, self._at)
            return False
        if self._may_begin and self._inner is not self.root and self._read_run():
            return True
        if self._may_end and sign == ("]" if isinstance(self._inner, list) else "}"):
            self._close()
        elif self._may_begin:
            self._begin_value(sign)
        elif sign == ",":
            self._at += 1
            self._may_begin, self._may_end = True, False
        else:
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, self._at)
        return True

    def _read_run(self) -> bool:
        """Parse a run of simple values at `_at`, each followed by a comma; returns whether there
        was such a value."""
        inner, start = self._inner, self._at
        if isinstance(inner, list):
            scalars = _SCALARS.match(self._text, start)
            found = scalars or _ITEMS.match(self._text, start)
        else:
            scalars, found = None, _FIELDS.match(self._text, start)
        if found is None:
            return False
        brackets = "[]" if isinstance(inner, list) else "{}"
        try:
            run = _DECODER.decode(f"{brackets[0]}{found[0][:-1]}{brackets[1]}")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, self._text, start + error.pos - 1) from None
        if isinstance(inner, list):
            inner += run
            self._count(len(run), 0)
        else:
            for name in inner.keys() & run.keys():
                raise _duplicate_field(name)
            inner |= run
            self._count(len(run), len(run))
        if scalars is None:
            for value in run if isinstance(inner, list) else run.values():
                if isinstance(value, (list, dict)):
                    self._count(len(value), 1 + (len(value) if isinstance(value, dict) else 0))
        self._at = found.end()
        self._may_begin, self._may_end = True, False
        return True

    def _begin_value(self, sign: str) -> None:
        if isinstance(self._inner, dict):
            sign = self._read_name(sign)
            self._count(0, 1)
        self._count(1, 0)
        if sign in ("[", "{"):
            self._open([] if sign == "[" else {})
            return
        if sign == '"':
            value, self._at = _read_text(self._text, self._at + 1)
        else:
            value = self._read_scalar()
        self._add(value)
        self._may_begin, self._may_end = False, True

    def _read_name(self, sign: str) -> str:
        """Read the name of a field and its colon; returns the first character of the value."""
        if sign != '"':
            expected = "Expecting property name enclosed in double quotes"
            raise json.JSONDecodeError(expected, self._text, self._at)
        self._name, self._at = _read_text(self._text, self._at + 1)
        if self._name in self._inner:
            raise _duplicate_field(self._name)
        if self._next_sign() != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", self._text, self._at)
        self._at += 1
        return self._next_sign()

    def _read_scalar(self) -> Any:
        number = _NUMBER.match(self._text, self._at)
        length = 0 if number is None else len(number[0])
        if length > MAX_NUMBER_CHARACTERS:
            raise InvalidRequestError(
                f"the body has a number of {length} characters at character {self._at}, above the"
                f" bound of {MAX_NUMBER_CHARACTERS}; send fewer digits"
            )
        try:
            value, self._at = _scan_once(self._text, self._at)
        except StopIteration as end:
            raise json.JSONDecodeError("Expecting value", self._text, end.value) from None
        return value

    def _open(self, value: Any) -> None:
        if len(self._outer) >= MAX_DEPTH:
            raise InvalidRequestError(
                f"the body's JSON is nested too deeply: more than {MAX_DEPTH} lists and objects"
                " inside of each other"
            )
        self._count(0, 1)
        self._add(value)
        self._outer.append((self._inner, self._name))
        self._inner = value
        self._at += 1
        self._may_begin = self._may_end = True

    def _close(self) -> None:
        self._inner, self._name = self._outer.pop()
        self._at += 1
        self._may_begin, self._may_end = False, True

    def _add(self, value: Any) -> None:
        if isinstance(self._inner, list):
            self._inner.append(value)
        else:
            self._inner[self._name] = value

    def _count(self, num_values: int, num_parts: int) -> None:
        self._num_values += num_values
        self._num_parts += num_parts
        if self._num_values > self._max_values or self._num_parts > MAX_PARTS:
            raise InvalidRequestError(
                f"the body has more than {self._max_values} values, or more than {MAX_PARTS} lists,"
                " objects and fields; send less in one request"
            )

    def _next_sign(self) -> str:
        """Skip spaces and return the next character; empty at the end of the text."""
        found = _SPACES.match(self._text, self._at)
        assert found is not None, "it matches the empty text, too"
        self._at = found.end()
        return self._text[self._at : self._at + 1]


def _check_texts(value: dict[str, Any] | list[Any]) -> Generator[None, None, None]:
    """Refuse texts and names of fields at any depth of `value` that have an unpaired surrogate.

    Works without recursion and examines each value once; may pause at every yield. Raises
    InvalidRequestError.
    """
    rest: list[tuple[Any, Path]] = [(value, None)]
    while rest:
        outer, path = rest.pop()
        items = iter(outer.items() if isinstance(outer, dict) else enumerate(outer))
        while some := list(islice(items, _VALUES_AT_ONCE)):
            for name, inner in some:
                if isinstance(name, str) and not name.isascii() and _SURROGATE.search(name):
                    _check_name(name, path)
                if isinstance(inner, str):
                    if not inner.isascii() and _SURROGATE.search(inner):
                        check_characters(inner, _dotted((path, name)))
                elif inner and isinstance(inner, (dict, list)):
                    rest.append((inner, (path, name)))
            yield


def _check_name(name: str, path: Path) -> None:
    check_characters(name, _dotted(path) or name, f"the name of a field, {name!a:.80},")


def _dotted(path: Path) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(str(name))
    return ".".join(reversed(names))
