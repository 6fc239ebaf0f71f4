"""Parses the JSON of a request's body, more strictly than Python does.

Python keeps the last of several fields with one name, where a proxy that checks calls may have read
the first; and it takes halves of surrogate pairs, which are no characters and stand in no prompt or
answer. Both are refused by name, wherever they are. The routes that have a body are `JSONRoute`s.
Knows no fields.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from quire.errors import InvalidRequestError, check_characters

LONG_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread: some tens of milliseconds at most, in which others go on
whenever Python code of the parser runs."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON writes it. Characters that are not escaped are none: the body
is UTF-8."""

_SURROGATE = re.compile("[\ud800-\udfff]")

Path = tuple["Path", str | int] | None
"""Where a value stands: in what, and under which name or at which position."""


class JSONRequest(Request):
    """A request whose `json` is `parse` of its body. Where it fails, FastAPI answers with the cause
    of the failure, as `errors` tells it."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(parse, body)
        return parse(body)


class JSONRoute(APIRoute):
    """A route whose body is read by `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return handle_json


def parse(body: bytes) -> Any:
    """The JSON value in `body`.

    Raises json.JSONDecodeError, UnicodeDecodeError for what is not UTF-8, and InvalidRequestError
    for two fields of one name in one object and for a text with half of a surrogate pair.
    """
    text = str(body, "utf-8-sig")
    value = _DECODER.decode(text)
    if isinstance(value, (dict, list)) and _HALF.search(text):
        _check_texts(value)
    return value


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the fields that were read, if each name is there once."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = set()
    for name, _ in pairs:
        if name in names:
            break
        names.add(name)
    raise InvalidRequestError(
        f"the body has the field {name!r:.80} twice in one object; give it once", name
    )


_DECODER = json.JSONDecoder(object_pairs_hook=_fields)


def _check_texts(value: dict[str, Any] | list[Any]) -> None:
    """Raises InvalidRequestError for a text in `value`, at any depth, or for the name of a field,
    that has half of a surrogate pair. Without recursion, and with a look at each value only."""
    rest: list[tuple[Any, Path]] = [(value, None)]
    while rest:
        outer, path = rest.pop()
        if isinstance(outer, dict):
            for name in outer:
                if not name.isascii() and _SURROGATE.search(name):
                    _check_name(name, path)
        for name, inner in outer.items() if isinstance(outer, dict) else enumerate(outer):
            if isinstance(inner, str):
                if not inner.isascii() and _SURROGATE.search(inner):
                    check_characters(inner, _dotted((path, name)))
            elif isinstance(inner, (dict, list)):
                rest.append((inner, (path, name)))


def _check_name(name: str, path: Path) -> None:
    check_characters(name, _dotted(path) or name, f"the name of a field, {name!a:.80},")


def _dotted(path: Path) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(str(name))
    return ".".join(reversed(names))
