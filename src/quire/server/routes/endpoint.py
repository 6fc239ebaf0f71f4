"""Declares endpoints: a router for each route file, which also says who may call its paths.

A route file makes one `Endpoints` and puts its routes there. `app` lists the routers and reads from
them who may call, which errors have another form, and which paths to suggest. A body's class
declares its fields, refused fields, notes and bounds (`http.body`).
"""

import re
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import InvalidRequestError
from quire.server.http.body import Body
from quire.server.http.errors import ErrorForm, PathForm, openai_error
from quire.server.http.json_body import LONG_BODY_BYTES, MAX_VALUES, parse
from quire.server.limits import CallLimits
from quire.server.routes.unsupported import METHODS, refuse
from quire.server.service import note_ignored, service_of

MAX_FIELDS = 1000
"""Most fields of a body's object, and of its extra_body: unknown ones are named one by one."""

IGNORED_HEADER = b"x-ignored-fields"
MAX_IGNORED_CHARACTERS = 1000
MAX_NAME_CHARACTERS = 80
"""The bounds of the header and of one name in it."""

_NOT_PRINTABLE = re.compile(r"[^!-~ ]|,")


class JSONRequest(Request):
    """A request whose `json` parses the body within the server's bounds.

    If parsing fails, FastAPI answers with the cause, in the form that `http.errors` gives it.
    """

    #: Class that the route makes from the JSON; None if it takes no body.
    body_class: type[Body] | None = None

    async def json(self) -> Any:
        service = service_of(self)
        max_values = MAX_VALUES if self.body_class is None else self.body_class.max_values
        content = await self.body()
        is_long = len(content) > LONG_BODY_BYTES
        # Parse the body, waiting for a turn if it is long.
        async with service.parsing.turn(len(content)):
            value = await service.work.run(parse(content, max_values), is_long=is_long)
        # Check its sizes, and take out unknown fields that are to be ignored.
        if self.body_class is not None:
            max_model_len = service.engine.limits.max_model_len
            check_parsed(value, self.body_class, service.limits, max_model_len)
            rule = service.unknown_fields or self.body_class.unknown_fields
            if rule == "ignore" and isinstance(value, dict):
                value, unknown = self.body_class.without_unknown(value)
                note_ignored(self, unknown)
            if service.unknown_fields != "refuse" and isinstance(value, dict):
                value, unknown = self.body_class.without_unknown_inside(value)
                note_ignored(self, unknown)
        return value


def check_parsed(value: Any, kind: type[Body], limits: CallLimits, max_model_len: int) -> None:
    """Check the sizes in a body's JSON, including the fields in extra_body. Raises
    InvalidRequestError, PromptTooLongError."""
    if isinstance(value, dict):
        more = value.get("extra_body")
        inner = more if isinstance(more, dict) else {}
        if (most := max(len(value), len(inner))) > MAX_FIELDS:
            raise InvalidRequestError(
                f"the body has {most} fields, above the bound of {MAX_FIELDS}; leave out unknown"
                " ones"
            )
        # A field that is in both is refused later, when the body is validated.
        fields = value | inner
        kind.check_fields(fields, limits, max_model_len)


class _NamingIgnored(Response):
    """An answer with a header that names the ignored fields of the call."""

    def __init__(self, answer: Response, names: Iterable[str]) -> None:
        self._answer = answer
        few = islice(names, MAX_IGNORED_CHARACTERS)  # the header has no room for more
        # Replace characters of a client's names that a header must not contain.
        known = dict.fromkeys(_NOT_PRINTABLE.sub("?", name)[:MAX_NAME_CHARACTERS] for name in few)
        self._value = ", ".join(known)[:MAX_IGNORED_CHARACTERS].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (IGNORED_HEADER, self._value)]
            await send(message)

        await self._answer(scope, receive, send_named)


class JSONRoute(APIRoute):
    """A route whose body is read by `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body_class: type[Body] | None = None
        if self.body_field is not None:
            annotation: Any = self.body_field.field_info.annotation
            is_body = isinstance(annotation, type) and issubclass(annotation, Body)
            body_class = annotation if is_body else None

        async def handle_json(request: Request) -> Response:
            json_request = JSONRequest(request.scope, request.receive)
            json_request.body_class = body_class
            response = await handle(json_request)
            ignored = request.scope.get("state", {}).get("ignored_fields")
            return _NamingIgnored(response, ignored) if ignored else response

        return handle_json


class Endpoints(APIRouter):
    """The routes of one file.

    Where the server has keys, every path needs one unless it is declared open here.
    """

    def __init__(
        self,
        *,
        open_paths: Iterable[str] = (),
        operator_paths: Iterable[str] = (),
        probes: Iterable[str] = (),
        is_suggested: bool = True,
        error_form: ErrorForm = openai_error,
        generating_paths: Iterable[str] = (),
        responses: dict[int | str, dict[str, Any]] | None = None,
    ) -> None:
        """`responses` describes, in the OpenAPI document, the answers of routes that do not
        describe their own.

        Raises ValueError for an open or an operator's path with a parameter, since access is
        decided by the call's path before its route is known.
        """
        super().__init__(route_class=JSONRoute, responses=responses)
        #: Paths that are served without a key.
        self.open_paths = frozenset(open_paths)
        #: Paths that only the operator may call, with all paths below them.
        self.operator_paths = tuple(operator_paths)
        for path in (*self.open_paths, *self.operator_paths):
            if "{" in path:
                raise ValueError(f"{path} has a parameter; say who may call by a path without one")
        #: Paths that machines call every few seconds; their log lines have the level debug.
        self.probes = frozenset(probes)
        #: Whether the error for an unknown path names these paths.
        self.is_suggested = is_suggested
        #: Function that makes the JSON of these paths' errors.
        self.error_form = error_form
        #: Paths that generate text; a recording includes their refused calls.
        self.generating_paths = frozenset(generating_paths)

    def refuse(self, path: str) -> None:
        """Answer every call to `path`, which other servers' APIs have, with NotSupportedError."""
        self.add_api_route(
            path, refuse, methods=list(METHODS), response_model=None, include_in_schema=False
        )

    @property
    def own_routes(self) -> list[APIRoute]:
        """The routes that are served, without refused ones."""
        routes = (route for route in self.routes if isinstance(route, APIRoute))
        return [route for route in routes if route.endpoint is not refuse]

    @property
    def paths(self) -> list[str]:
        """The paths that are served, without refused ones."""
        return list(dict.fromkeys(route.path for route in self.own_routes))

    @property
    def error_forms(self) -> list[PathForm]:
        """The served paths whose errors have another form than OpenAI's."""
        if self.error_form is openai_error:
            return []
        return [(route.path_regex, self.error_form) for route in self.own_routes]

    @property
    def batch_paths(self) -> list[str]:
        """The suggested paths below /v1/ that take a body."""
        routes = [route for route in self.own_routes if self.is_suggested and route.body_field]
        return [route.path for route in routes if route.path.startswith("/v1/")]
