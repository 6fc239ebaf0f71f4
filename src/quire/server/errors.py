"""Every error as OpenAI's clients expect it: {"error": {message, type, param, code}}.

Installed by `app`. What the client did wrong is told by name; what went wrong here is logged by the
server and told without its insides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from quire.errors import InvalidRequestError, OverloadedError, QuireError

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


def error_body(error: QuireError) -> dict[str, Any]:
    """The JSON of an error that quire raised."""
    param = getattr(error, "param", None)
    return _body(error.http_status, str(error), param=param, code=error.code)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    @app.exception_handler(QuireError)
    async def on_quire_error(_request: HTTPRequest, error: QuireError) -> JSONResponse:
        headers = {}
        if isinstance(error, OverloadedError):
            headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        return JSONResponse(error_body(error), error.http_status, headers)

    @app.exception_handler(RequestValidationError)
    async def on_bad_body(_request: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(_first_mistake(error.errors())), 400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: HTTPRequest, error: HTTPException) -> JSONResponse:
        message = _http_message(request, error)
        return JSONResponse(_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_request: HTTPRequest, error: Exception) -> JSONResponse:
        message = f"the server failed at this request ({type(error).__name__}); its log says more"
        return JSONResponse(_body(500, message, code=QuireError.code), 500)


def _body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _http_message(request: HTTPRequest, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"there is no {request.url.path} here; try /v1/completions, /v1/chat/completions"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{request.url.path} does not take {request.method}; use {allowed}"
    return str(error.detail)


def _first_mistake(mistakes: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """What is wrong with a body: the first field at fault, with all that it could have been."""
    first = mistakes[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return InvalidRequestError(f"the body is not valid JSON: {reason} (at {first['loc'][-1]})")
    path = [part for part in first["loc"] if part != "body"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        return InvalidRequestError(str(cause), ".".join([*map(str, path), str(cause.param)]))
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {first['msg']}")
    return _wrong_type(path, [m for m in mistakes if path[0] in m["loc"]])


def _wrong_type(
    path: Sequence[str | int], mistakes: Sequence[Mapping[str, Any]]
) -> InvalidRequestError:
    """A field of the wrong type. One of several alternatives has a mistake for each of them."""
    if mistakes[0]["type"] == "missing":
        return InvalidRequestError(f"{path[-1]} is missing, but must be given", str(path[-1]))
    param = ".".join(str(part) for part in path) if len(mistakes) == 1 else str(path[0])
    reasons = dict.fromkeys(mistake["msg"].removeprefix("Input ") for mistake in mistakes)
    return InvalidRequestError(f"{param} {', or '.join(reasons)}", param)
