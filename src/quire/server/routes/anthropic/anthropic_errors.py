"""Errors as Anthropic's clients expect them: {"type": "error", "error": {...}, "request_id"}."""

from typing import Any

from quire.observability.log import current_call
from quire.server.routes.openapi import error_responses

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(
    status: int, message: str, param: str | None, code: str | None
) -> dict[str, Any]:
    """An error in the form of Anthropic's API, extended by `param` and `code`."""
    default = "invalid_request_error" if status < 500 else "api_error"
    call = current_call()
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, default),
            "message": message,
            "param": param,
            "code": code,
        },
        "request_id": None if call is None else call.request_id,
    }


_NULL_TEXT = {"type": ["string", "null"]}

ERROR_RESPONSES = error_responses(
    {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string", "description": "what is wrong, and what to do"},
                    "param": {**_NULL_TEXT, "description": "the field at fault"},
                    "code": _NULL_TEXT,
                },
            },
            "request_id": _NULL_TEXT,
        },
    }
)
"""The descriptions of error answers for the OpenAPI document."""
