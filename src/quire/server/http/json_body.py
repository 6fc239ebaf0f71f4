"""Parses the JSON of a request's body, more strictly than Python does.

Python keeps the last of several fields with one name, where a proxy that checks calls may have read
the first; and it takes halves of surrogate pairs, which are no characters and stand in no prompt or
answer. Both are refused by name, wherever they are. The routes that have a body are `JSONRoute`s.
Knows no fields.
"""

import json
import re
from collections.abc import Callable, Coroutine, Generator
from itertools import islice
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from quire.errors import check_characters
from quire.server.http.json_pieces import MAX_NUMBER_CHARACTERS, parse_in_pieces, unique_fields
from quire.server.service import service_of

LONG_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in pieces, between which others go on."""

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_NUMBER_CHARACTERS + 1}}}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON writes it. Characters that are not escaped are none: the body
is UTF-8."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_VALUES_AT_ONCE = 1000
"""So many are looked at between two pauses: some hundredths of a millisecond."""

Path = tuple["Path", str | int] | None
"""Where a value stands: in what, and under which name or at which position."""


class JSONRequest(Request):
    """A request whose `json` is `parse` of its body, within the server's bounds. Where it fails,
    FastAPI answers with the cause of the failure, as `errors` tells it."""

    async def json(self) -> Any:
        service = service_of(self)
        value = await service.pieces.run(parse(await self.body()))
        service.limits.check_parsed(value, service.engine.limits.max_model_len)
        return value


class JSONRoute(APIRoute):
    """A route whose body is read by `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return handle_json


def parse(body: bytes) -> Generator[None, None, Any]:
    """The JSON value in `body`; may pause at every yield. A short body has none.

    Raises json.JSONDecodeError, UnicodeDecodeError for what is not UTF-8, and InvalidRequestError
    for two fields of one name in one object, for a text with half of a surrogate pair, and for what
    is beyond the bounds of `json_pieces`.
    """
    text = str(body, "utf-8-sig")
    if len(body) > LONG_BODY_BYTES or _LONG_NUMBER.search(text):
        value = yield from parse_in_pieces(text)
    else:
        value = _DECODER.decode(text)
    if isinstance(value, (dict, list)) and _HALF.search(text):
        yield from _check_texts(value)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique_fields)


def _check_texts(value: dict[str, Any] | list[Any]) -> Generator[None, None, None]:
    """Raises InvalidRequestError for a text in `value`, at any depth, or for the name of a field,
    that has half of a surrogate pair. Without recursion, and with a look at each value only; may
    pause at every yield."""
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
