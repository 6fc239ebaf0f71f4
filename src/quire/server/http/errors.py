"""Turns every error into JSON, by default {"error": {message, type, param, code}} like OpenAI's.

Installed by `app`; also used by the middlewares and streams. The answer to a client's mistake says
what is wrong; a failure of the server is logged, and its answer has no traceback and no path.
"""

import errno
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from quire.errors import (
    AuthenticationError,
    ConfigurationError,
    EngineDeadError,
    ExhaustedError,
    InvalidRequestError,
    QuireError,
    did_you_mean,
)
from quire.observability.log import get_logger

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}
"""Codes of errors that the HTTP framework raises, by status."""

CLIENT_GONE_STATUS = 499
"""The status that the log shows if the client disconnects before the answer begins, as in nginx."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of the operating system that may not recur once other work has ended."""

MAX_MESSAGE_CHARACTERS = 2000
MAX_PARAM_CHARACTERS = 200
"""The bounds of an error's message and param, which may quote megabytes that a client has sent."""

logger = get_logger(__name__)


ErrorForm = Callable[[int, str, str | None, str | None], dict[str, Any]]
"""(status, message, field at fault, code) -> an error in the JSON form of one API."""

PathForm = tuple[re.Pattern[str], ErrorForm]
"""(pattern of a route's paths, form of their errors)"""


def openai_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in the form of OpenAI's API, the default for all paths."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: QuireError, form: ErrorForm = openai_error) -> dict[str, Any]:
    """The JSON of an error that quire raised."""
    shown = _for_clients(error)
    param = getattr(shown, "param", None)
    return _body(form, shown.http_status, str(shown), param=param, code=shown.code)


def error_form(scope: Scope) -> ErrorForm:
    """The JSON form of a call's errors: the form that the route declares, or OpenAI's by
    default."""
    state = getattr(scope.get("app"), "state", None)
    forms: Sequence[PathForm] = getattr(state, "error_forms", ())
    path = scope.get("path", "")
    return next((form for pattern, form in forms if pattern.match(path)), openai_error)


def error_response(scope: Scope, error: QuireError) -> Response:
    """The error as an answer to the call of `scope`. Also puts the error's code into the call's
    state, for the access log."""
    shown = _for_clients(error)
    _mark(scope, shown.code)
    body = error_body(shown, error_form(scope))
    return JSONResponse(body, shown.http_status, _headers(shown))


def error_handlers(
    suggested: Sequence[str] = (),
) -> dict[type[Exception], Callable[[HTTPRequest, Any], Awaitable[Response]]]:
    """The exception handlers of the application, which answer in the error form of the call's path.
    The error for an unknown path suggests the paths in `suggested`."""

    async def on_quire_error(request: HTTPRequest, error: QuireError) -> Response:
        return error_response(request.scope, error)

    async def on_http_error(request: HTTPRequest, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code)
        _mark(request.scope, code)
        message = _http_message(request, error, suggested)
        form = error_form(request.scope)
        body = _body(form, error.status_code, message, code=code)
        return JSONResponse(body, error.status_code, error.headers)

    async def on_deep_nesting(request: HTTPRequest, error: RecursionError) -> Response:
        # Usually a client's nested JSON causes this. The log shows whether it is a bug of quire.
        logger.warning("a request was too deeply nested", exc_info=error)
        return error_response(request.scope, _too_deep())

    async def on_bug(request: HTTPRequest, error: Exception) -> Response:
        return bug_response(request.scope, error)

    return {
        QuireError: on_quire_error,
        HTTPException: on_http_error,
        RecursionError: on_deep_nesting,
        Exception: on_bug,
    }


def _for_clients(error: QuireError) -> QuireError:
    """The error that a client gets: only the server's log has the reason why an engine can't be
    started again."""
    if isinstance(error, ConfigurationError):
        return EngineDeadError("the engine can't be started again; the server's log says why")
    return error


def _headers(error: QuireError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if not error.may_be_retried:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients otherwise retry by status
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if error.ends_connection:
        headers["Connection"] = "close"
    return headers


def _body(
    form: ErrorForm, status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS]}..."
    if param is not None:
        param = _encodable(param[:MAX_PARAM_CHARACTERS])
    return form(status, _encodable(message), param, code)


def _encodable(text: str) -> str:
    """The text with unpaired surrogates as escapes: a client may send them, but UTF-8 can't encode
    them."""
    return text.encode(errors="backslashreplace").decode()


def bug_response(scope: Scope, error: Exception) -> Response:
    """The answer to a call whose handler raised an unexpected exception, without internals."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _EXHAUSTED:
        return error_response(
            scope, ExhaustedError("the server has no memory or no file descriptor left; retry")
        )
    _mark(scope, QuireError.code)
    message = f"the server failed at this request ({type(error).__name__}); its log says more"
    body = _body(error_form(scope), 500, message, code=QuireError.code)
    return JSONResponse(body, 500)


def _mark(scope: Scope, code: str | None) -> None:
    scope.setdefault("state", {})["error_code"] = code or ""


def _http_message(request: HTTPRequest, error: HTTPException, suggested: Sequence[str]) -> str:
    path = f"{request.url.path:.200}"
    if error.status_code == 404:
        known = getattr(request.app.state, "suggested_paths", ())
        hint = did_you_mean(path, known) or (f"; try {', '.join(suggested)}" if suggested else "")
        return f"there is no {path} here{hint}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} does not take {request.method}; use {allowed}"
    return str(error.detail)


def unreadable_body(error: Exception) -> QuireError:
    """The error for the client, if parsing its body raised `error`."""
    if isinstance(error, QuireError):
        return error
    if isinstance(error, RecursionError):
        return _too_deep()
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}")
    if isinstance(error, json.JSONDecodeError):
        return InvalidRequestError(f"the body is not valid JSON: {error.msg} (at {error.pos})")
    return InvalidRequestError("the body can't be read as JSON")


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError("the body's JSON is nested too deeply")


def first_mistake(error: ValidationError, place: Sequence[str] = ()) -> InvalidRequestError:
    """The error for the first mistake in a body or a query, with all types that the field may have.
    The error's param begins with `place`."""
    mistakes = error.errors(include_url=False)
    first, path = mistakes[0], [*place, *mistakes[0]["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        return InvalidRequestError(str(cause), ".".join([*map(str, path), str(cause.param)]))
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {first['msg']}")
    field = first["loc"][0]
    return _wrong_type(path, [mistake for mistake in mistakes if field in mistake["loc"]])


def _wrong_type(
    path: Sequence[str | int], mistakes: Sequence[Mapping[str, Any]]
) -> InvalidRequestError:
    """The error for a field of the wrong type. `mistakes` has an entry for each type that the field
    may have."""
    if mistakes[0]["type"] == "missing":
        return InvalidRequestError(f"{path[-1]} is missing, but must be given", str(path[-1]))
    param = ".".join(str(part) for part in path) if len(mistakes) == 1 else str(path[0])
    reasons = dict.fromkeys(mistake["msg"].removeprefix("Input ") for mistake in mistakes)
    return InvalidRequestError(f"{param} {', or '.join(reasons)}", param)
