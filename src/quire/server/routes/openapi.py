"""Schemas of routes' answers for the OpenAPI document, /openapi.json.

msgspec encodes the answers, without models of FastAPI, so their schemas are made here. Called by
the files that define routes. Knows no route.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.server.http.streaming import SSE

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
    """The `responses` of a route that answers with `kind` or, on request, with a stream of
    events."""
    content: dict[str, Any] = {"application/json": {"schema": json_schema(kind)}}
    if streams:
        content[stream_type] = {"schema": {"type": "string"}}
    return {200: {"description": "the answer", "content": content}, **errors}


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a struct in one piece, without references. Structs must not be
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
