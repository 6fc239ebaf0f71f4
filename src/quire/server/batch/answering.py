"""Makes one call of a batch, and writes its answer as a line.

Called by `run` and `background`.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp

from quire.server.batch.files import BatchCall
from quire.server.batch.inner_call import InnerAnswer, post

RETRIED = (429, 503)
"""Statuses of calls that are made again, since the server may answer them later."""

STREAMED = msgspec.json.encode(
    {
        "error": {
            "message": "stream is set, but a batch has whole answers; leave it out",
            "type": "invalid_request_error",
            "param": "stream",
            "code": "invalid_request",
        }
    }
)


class _StreamField(msgspec.Struct):
    stream: Any = None


async def answer_call(
    app: ASGIApp,
    call: BatchCall,
    state: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> InnerAnswer:
    """The application's answer, whatever its status. `state` and `headers` are as in `post`."""
    if msgspec.json.decode(call.body, type=_StreamField).stream is True:
        return InnerAnswer(400, body=STREAMED)
    return await post(app, call.url, call.body, state, headers)


def answer_line(call: BatchCall, answer: InnerAnswer) -> dict[str, Any]:
    """An answer as a line of the file of answers."""
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id"),
        "body": msgspec.Raw(answer.body) if answer.body else None,
    }
    return _line(call.custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The line of a call that was not made."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: Any, error: Any) -> dict[str, Any]:
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}
