"""Makes the OpenAPI document, /openapi.json, and the schemas by which routes describe answers.

pydantic makes the schemas of bodies and queries, msgspec the schemas of answers. Called by the
files that define routes, and by `docs_page`.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import BaseRoute

from quire.server.http.streaming import SSE
from quire.server.routes.endpoint import JSONRoute
from quire.version import __version__

_ERROR_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "what is wrong, and what to do"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_responses(body: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose errors have this JSON schema."""
    content = {"application/json": {"schema": body}}
    return {
        "4XX": {
            "description": "400: a field can't be obeyed (`param` names it); 401: no valid API key;"
            " 404: no such model or path; 408: the deadline passed; 413: the body is too long; "
            "429: too much at once (Retry-After says when to come back)",
            "content": content,
        },
        "5XX": {
            "description": "500: the server failed; 503: it is starting, draining or has lost its "
            "engine",
            "content": content,
        },
    }


ERROR_RESPONSES = error_responses(_ERROR_BODY)
"""The `responses` of any route with OpenAI's errors."""


def answers(
    kind: type[msgspec.Struct],
    *,
    streams: bool = False,
    stream_type: str = SSE,
    errors: Mapping[int | str, Any] = ERROR_RESPONSES,
) -> dict[int | str, Any]:
    """The `responses` of a route that answers with `kind`. With `streams`, a stream of events is
    the alternative."""
    content: dict[str, Any] = {"application/json": {"schema": json_schema(kind)}}
    if streams:
        content[stream_type] = {"schema": {"type": "string"}}
    return {200: {"description": "the answer", "content": content}, **errors}


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, with references replaced by their schemas. Structs must not be
    recursive."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    resolved = _resolved(schema, parts)
    assert isinstance(resolved, dict)
    return resolved


def _resolved(value: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _resolved(parts[value["$ref"]], parts)
        return {name: _resolved(part, parts) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(part, parts) for part in value]
    return value


def api_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of all routes that are not excluded from it."""
    shown = [route for route in routes if isinstance(route, JSONRoute) and route.include_in_schema]
    bodies, shared = TypeAdapter.json_schemas(
        [
            (at, "validation", route.body)
            for at, route in enumerate(shown)
            if route.body is not None
        ],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for at, route in enumerate(shown):
        body = bodies.get((at, "validation"))
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _call(route, method, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": dict(sorted(shared.get("$defs", {}).items()))},
    }


def _call(route: JSONRoute, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description of one method of a route. `body` is the schema of its request body."""
    found: dict[str, Any] = {
        "summary": _title(route.name),
        "description": inspect.getdoc(route.handler) or "",
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
    }
    if parameters := _parameters(route):
        found["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"content": content, "required": True}
    success: dict[str, Any] = {"description": "Successful Response"}
    if not (inspect.isclass(route.result_type) and issubclass(route.result_type, Response)):
        schema = TypeAdapter(route.result_type).json_schema()
        success["content"] = {"application/json": {"schema": schema}}
    answers = {200: success, **route.responses}
    return found | {"responses": {str(status): answer for status, answer in answers.items()}}


def _parameters(route: JSONRoute) -> list[dict[str, Any]]:
    """The parameters in a route's path, then the fields of its query."""
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "title": _title(name)},
        }
        for name in route.param_convertors
    ]
    if route.query_class is not None:
        schemas = route.query_class.model_json_schema()["properties"]
        for name, field in route.query_class.model_fields.items():
            required = field.is_required()
            found.append(
                {"name": name, "in": "query", "required": required, "schema": schemas[name]}
            )
    return found


def _title(name: str) -> str:
    return name.replace("_", " ").title()
