"""Declares endpoints: each route file has a router with its routes and their access rules.

A route file makes one `Endpoints` and adds its routes. `app` lists these routers and reads from
them who may call each path, which JSON form its errors have, and which paths a 404 suggests. A
body's class declares its fields, refused fields, notes and bounds (`http.body`).
"""

import inspect
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError, create_model
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route, get_name
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequestError
from quire.server.hosted_model import HostedModel
from quire.server.http.body import Body
from quire.server.http.errors import (
    CLIENT_GONE_STATUS,
    ErrorForm,
    PathForm,
    first_mistake,
    openai_error,
    unreadable_body,
)
from quire.server.http.guard import brings_key, is_below
from quire.server.http.json_body import LONG_BODY_BYTES, MAX_VALUES, parse
from quire.server.http.streaming import ClientGoneError, json_response
from quire.server.limits import CallLimits
from quire.server.routes.unsupported import METHODS, refuse
from quire.server.served_models import ServedModels, caller_of, models_of
from quire.server.service import report_ignored_fields

MAX_FIELDS = 1000
"""Maximum number of fields of a body, and of its extra_body. Unknown fields are all reported."""

IGNORED_HEADER = "x-ignored-fields"
MAX_IGNORED_CHARACTERS = 1000
MAX_NAME_CHARACTERS = 80
"""The maximum characters of the header of ignored fields, and of one name in the header."""

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
"""A function that answers calls with a Response, or with a mapping that becomes JSON."""

H = TypeVar("H", bound=Handler)

Responses: TypeAlias = Mapping[int | str, Any]
"""Descriptions of a route's answers by status, for the OpenAPI document."""

_JSON_TYPE = re.compile(r" *application/([^/;,]*\+)?json *(;|$)", re.IGNORECASE)
_NOT_PRINTABLE = re.compile(r"[^!-~ ]|,")


async def read_json(http: HTTPRequest, content: bytes, body_class: type[Body] | None) -> Any:
    """The JSON of a call's body within the server's bounds, without the fields that are ignored.

    Raises InvalidRequestError, PromptTooLongError, OverloadedError.
    """
    models = models_of(http)
    shared = models.shared
    max_values = MAX_VALUES if body_class is None else body_class.max_values
    is_long = len(content) > LONG_BODY_BYTES
    # Parse the body, waiting for a turn if it is long.
    try:
        async with shared.parsing.turn(len(content)):
            value = await shared.work.run(parse(content, max_values), is_long=is_long)
    except (ValueError, RecursionError) as error:
        raise unreadable_body(error) from error
    # Wait until the model that it names is in memory.
    model = await enter_model(http, models, value, body_class)
    # Check its sizes, and remove unknown fields that are to be ignored.
    if body_class is not None:
        check_parsed(value, body_class, shared.limits, model.max_model_len)
        rule = shared.unknown_fields or body_class.unknown_fields
        if rule == "ignore" and isinstance(value, dict):
            value, unknown = body_class.without_unknown(value)
            report_ignored_fields(http, unknown)
        if shared.unknown_fields != "refuse" and isinstance(value, dict):
            value, unknown = body_class.without_unknown_inside(value)
            report_ignored_fields(http, unknown)
    return value


async def enter_model(
    http: HTTPRequest, models: ServedModels, value: Any, kind: type[Body] | None
) -> HostedModel:
    """The model that a body's JSON names, loaded if calls with such bodies need it. Raises
    UnknownModelError and the errors of `ServedModels.enter`."""
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    tenant = caller_of(http)
    if not ("model" in fields if kind is None else kind.needs_model(fields)):
        return models.default
    name = fields["model"] if kind is None else kind.model_named(fields)
    model = models.find(name, tenant)
    await models.enter(http, model)
    return model


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
        # A field that is both in the body and in extra_body is refused later, by validation.
        fields = value | inner
        kind.check_fields(fields, limits, max_model_len)


def _as_header(names: Iterable[str]) -> str:
    """A client's names as the value of a header, without characters that headers must not have."""
    few = islice(names, MAX_IGNORED_CHARACTERS)  # the header has no room for more
    known = dict.fromkeys(_NOT_PRINTABLE.sub("?", name)[:MAX_NAME_CHARACTERS] for name in few)
    return ", ".join(known)[:MAX_IGNORED_CHARACTERS]


class JSONRoute(Route):
    """A route whose handler gets its arguments from the call, by the parameters' names.

    The parameter `body` gets the validated JSON of the call's body, and a parameter of type Request
    the call. A name in the path gets that part of the path; any other name, a field of the query.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        methods: Collection[str],
        *,
        responses: Responses,
        include_in_schema: bool = True,
    ) -> None:
        name = get_name(handler)
        super().__init__(path, self._answer, name=name, include_in_schema=include_in_schema)
        self.methods = set(methods)
        self.handler = handler
        self.responses = responses
        signature = inspect.signature(handler, eval_str=True)
        #: Type of the handler's result.
        self.result_type = signature.return_annotation
        #: Validator of the body. None if the route takes no body.
        self.body: TypeAdapter[Any] | None = None
        #: Class of the body. None if the route takes no body, or bodies of several classes.
        self.body_class: type[Body] | None = None
        self._call_names: list[str] = []
        self._path_names: list[str] = []
        query: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            kind, default = parameter.annotation, parameter.default
            if name == "body":
                self.body = TypeAdapter(kind)
                if inspect.isclass(kind) and issubclass(kind, Body):
                    self.body_class = kind
            elif kind is HTTPRequest:
                self._call_names.append(name)
            elif name in self.param_convertors:
                self._path_names.append(name)
            else:
                query[name] = (kind, ... if default is parameter.empty else default)
        #: pydantic model of the query's fields. None if the handler takes none.
        self.query_class = create_model("Query", **query) if query else None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # calls are counted by their route
        try:
            await super().handle(scope, receive, send)
        finally:
            if (models := getattr(scope["app"].state, "models", None)) is not None:
                models.leave(scope)

    async def _answer(self, http: HTTPRequest) -> Response:
        try:
            arguments = await self._arguments(http)
        except (ClientDisconnect, ClientGoneError):  # while it sent its body, or a model was loaded
            return Response(status_code=CLIENT_GONE_STATUS)
        result = await self.handler(**arguments)
        response = result if isinstance(result, Response) else json_response(result)
        if ignored := http.scope.get("state", {}).get("ignored_fields"):
            response.headers[IGNORED_HEADER] = _as_header(ignored)
        return response

    async def _arguments(self, http: HTTPRequest) -> dict[str, Any]:
        """The handler's arguments by name. Raises InvalidRequestError if one does not validate."""
        arguments: dict[str, Any] = dict.fromkeys(self._call_names, http)
        arguments |= {name: http.path_params[name] for name in self._path_names}
        if self.query_class is not None:
            fields = dict(http.query_params)
            arguments |= dict(_validated(self.query_class.model_validate, fields, "query"))
        if self.body is not None:
            value = await self._read_body(http)
            arguments["body"] = _validated(self.body.validate_python, value)
        return arguments

    async def _read_body(self, http: HTTPRequest) -> Any:
        content = await http.body()
        if not self.has_json(http):
            kind = http.headers.get("content-type", "")
            raise InvalidRequestError(
                f"the Content-Type is {kind!r:.80}, but must be application/json"
            )
        if not content:
            raise InvalidRequestError("the body must be a JSON object: Field required")
        return await read_json(http, content, self.body_class)

    def has_json(self, http: HTTPRequest) -> bool:
        """Whether the body must be read as JSON, according to its Content-Type."""
        return _JSON_TYPE.match(http.headers.get("content-type", "")) is not None


def refuse_unasked_page(http: HTTPRequest) -> None:
    """Refuse a call of a web page that its browser has sent without asking whether it may.

    Browsers ask first if a call has a header for keys, or JSON. Raises InvalidRequestError.
    """
    is_asked = _JSON_TYPE.match(http.headers.get("content-type", "")) is not None
    if "origin" in http.headers and not is_asked and not brings_key(http.scope["headers"]):
        raise InvalidRequestError(
            "a web page that makes this call must send an Authorization header, so that its browser"
            " asks first"
        )


def _validated(validate: Callable[..., Any], value: Any, *place: str) -> Any:
    """The value as pydantic's `validate` returns it. Raises InvalidRequestError."""
    try:
        return validate(value, from_attributes=True)
    except ValidationError as error:
        raise first_mistake(error, place) from error


class Endpoints:
    """The routes of one file.

    If the server has keys, a call of a path needs a key unless the path is declared open here.
    """

    #: Class of the routes.
    route_class: ClassVar[type[JSONRoute]] = JSONRoute

    def __init__(
        self,
        *,
        open_paths: Iterable[str] = (),
        operator_paths: Iterable[str] = (),
        probes: Iterable[str] = (),
        is_suggested: bool = True,
        error_form: ErrorForm = openai_error,
        generating_paths: Iterable[str] = (),
        upload_paths: Iterable[str] = (),
        responses: Responses | None = None,
    ) -> None:
        """`responses` describes answers of all these routes for the OpenAPI document. Each route
        may add more.

        Raises ValueError for an open path or an operator's path with a parameter, since access is
        decided by the call's path before its route is known.
        """
        #: Routes in the order in which a call's path is compared with theirs.
        self.routes: list[JSONRoute] = []
        self._responses = responses or {}
        #: Paths that are served without a key.
        self.open_paths = frozenset(open_paths)
        #: Paths that only the operator may call, with all paths below them.
        self.operator_paths = tuple(operator_paths)
        for path in (*self.open_paths, *self.operator_paths):
            if "{" in path:
                raise ValueError(f"{path} has a parameter; declare access by a path without one")
        #: Paths that monitoring calls every few seconds; their log lines have the level debug.
        self.probes = frozenset(probes)
        #: Whether the error for an unknown path suggests these paths.
        self.is_suggested = is_suggested
        #: Function that converts the errors of these paths to JSON.
        self.error_form = error_form
        #: Paths that generate text; a recording of the load includes their refused calls.
        self.generating_paths = frozenset(generating_paths)
        #: Paths that write long bodies to disk as they arrive.
        self.upload_paths = tuple(upload_paths)

    def route(
        self,
        path: str,
        *methods: str,
        responses: Responses | None = None,
        include_in_schema: bool = True,
    ) -> Callable[[H], H]:
        """Decorate the function that answers calls of `methods` to `path`."""
        described = {**self._responses, **(responses or {})}

        def add(handler: H) -> H:
            route = self.route_class(
                path, handler, methods, responses=described, include_in_schema=include_in_schema
            )
            self.routes.append(route)
            return handler

        return add

    def get(self, path: str, responses: Responses | None = None) -> Callable[[H], H]:
        """Decorate the function that answers GET calls, but not HEAD calls."""
        return self.route(path, "GET", responses=responses)

    def post(self, path: str, responses: Responses | None = None) -> Callable[[H], H]:
        """Decorate the function that answers POST."""
        return self.route(path, "POST", responses=responses)

    def delete(self, path: str, responses: Responses | None = None) -> Callable[[H], H]:
        """Decorate the function that answers DELETE."""
        return self.route(path, "DELETE", responses=responses)

    def refuse(self, path: str) -> None:
        """Answer calls to `path`, which other servers support, with NotSupportedError."""
        self.route(path, *METHODS, include_in_schema=False)(refuse)

    @property
    def own_routes(self) -> list[JSONRoute]:
        """The routes that are served, without refused ones."""
        return [route for route in self.routes if route.handler is not refuse]

    @property
    def paths(self) -> list[str]:
        """The paths that are served, without refused ones."""
        return list(dict.fromkeys(route.path for route in self.own_routes))

    @property
    def error_forms(self) -> list[PathForm]:
        """The paths whose errors have another form than OpenAI's, with refused ones."""
        if self.error_form is openai_error:
            return []
        return [(route.path_regex, self.error_form) for route in self.routes]

    @property
    def batch_paths(self) -> list[str]:
        """The suggested paths below /v1/ that take a body, without those of the operator: a call of
        a batch does not pass the check of who may call a path."""
        routes = [
            route for route in self.own_routes if self.is_suggested and route.body is not None
        ]
        paths = [route.path for route in routes if route.path.startswith("/v1/")]
        return [path for path in paths if not is_below(path, self.operator_paths)]
