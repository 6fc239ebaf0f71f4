"""How an endpoint is declared: a router, and who may call its paths.

A route file makes one `Endpoints` and puts its routes there; `app` lists the routers and reads
there who may call, which errors have another form, and which paths to suggest. A body's own class
says its fields, those that are refused, their notes and their bounds (`http.body`).
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from quire.server.http.body import Body
from quire.server.http.errors import ErrorForm, PathForm, openai_error
from quire.server.http.json_body import parse
from quire.server.limits import CallLimits
from quire.server.routes.unsupported import METHODS, refuse
from quire.server.service import service_of


class JSONRequest(Request):
    """A request whose `json` is `parse` of its body, within the server's bounds. Where it fails,
    FastAPI answers with the cause of the failure, in the form that `http.errors` gives it.

    body_class: what the route makes of the JSON; None: it takes none.
    """

    body_class: type[Body] | None = None

    async def json(self) -> Any:
        service = service_of(self)
        value = await service.work.run(parse(await self.body()))
        if self.body_class is not None:
            max_model_len = service.engine.limits.max_model_len
            check_parsed(value, self.body_class, service.limits, max_model_len)
        return value


def check_parsed(value: Any, kind: type[Body], limits: CallLimits, max_model_len: int) -> None:
    """Check the sizes in a body's JSON, of any kind, those of the fields in extra_body included.

    Raises InvalidRequestError, PromptTooLongError.
    """
    if isinstance(value, dict):
        for fields in (value, value.get("extra_body")):
            if isinstance(fields, dict):
                kind.check_fields(fields, limits, max_model_len)


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
            return await handle(json_request)

        return handle_json


class Endpoints(APIRouter):
    """The routes of one file. Every path needs a key, where the server has keys, unless it says
    otherwise here.

    open_paths: served without a key. operator_paths: for the operator alone, with all paths below
    them. probes: called every few seconds by machines; their log lines are of level debug.
    is_suggested: whether the error for an unknown path names these.
    error_form: of the errors of these paths.
    """

    def __init__(
        self,
        *,
        open_paths: Iterable[str] = (),
        operator_paths: Iterable[str] = (),
        probes: Iterable[str] = (),
        is_suggested: bool = True,
        error_form: ErrorForm = openai_error,
        responses: dict[int | str, dict[str, Any]] | None = None,
    ) -> None:
        """responses: for the OpenAPI document, of routes that say nothing of their answers.

        Raises ValueError for an open or an operator's path with a parameter in it: who may call is
        found out by the path of the call, before its route is.
        """
        super().__init__(route_class=JSONRoute, responses=responses)
        self.open_paths = frozenset(open_paths)
        self.operator_paths = tuple(operator_paths)
        for path in (*self.open_paths, *self.operator_paths):
            if "{" in path:
                raise ValueError(f"{path} has a parameter; say who may call by a path without one")
        self.probes = frozenset(probes)
        self.is_suggested = is_suggested
        self.error_form = error_form

    def refuse(self, path: str) -> None:
        """Answer every call to `path`, which others' APIs have, with NotSupportedError."""
        self.add_api_route(
            path, refuse, methods=list(METHODS), response_model=None, include_in_schema=False
        )

    @property
    def own_routes(self) -> list[APIRoute]:
        """Those that serve something."""
        routes = (route for route in self.routes if isinstance(route, APIRoute))
        return [route for route in routes if route.endpoint is not refuse]

    @property
    def paths(self) -> list[str]:
        """The paths that serve something."""
        return list(dict.fromkeys(route.path for route in self.own_routes))

    @property
    def error_forms(self) -> list[PathForm]:
        """Of the paths that serve something, where their errors have another form than OpenAI's."""
        if self.error_form is openai_error:
            return []
        return [(route.path_regex, self.error_form) for route in self.own_routes]

    @property
    def generating_paths(self) -> list[str]:
        """The suggested paths below /v1/ that take a body."""
        routes = [route for route in self.own_routes if self.is_suggested and route.body_field]
        return [route.path for route in routes if route.path.startswith("/v1/")]
