"""POST /api/pull and DELETE /api/delete of Ollama's API: models are fetched and removed.

Models are files of this machine's cache. A pull of a served model succeeds at once for any client
that may use it. All else is for the operator, on a server with `--manage-models`.
"""

import hashlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.errors import InvalidRequestError, OperatorOnlyError, QuireError
from quire.server.hosted_model import HostedModel
from quire.server.http.errors import CLIENT_GONE_STATUS, error_body
from quire.server.http.streaming import (
    NDJSON,
    ClientGoneError,
    EventStream,
    json_response,
    unless_disconnected,
)
from quire.server.model_store import ModelChangeError, ModelStore
from quire.server.routes.ollama.ollama_endpoints import OllamaEndpoints, ollama_error
from quire.server.routes.ollama.served_models import ERROR_RESPONSES, NamesModel
from quire.server.routes.openapi import answers
from quire.server.routes.unsupported import NotSupportedError
from quire.server.served_models import models_of, visible_models
from quire.server.service import SharedState

DELETE = "/api/delete"

router = OllamaEndpoints(operator_paths=(DELETE,))


class OllamaStatus(msgspec.Struct):
    """A line about the progress of a pull."""

    status: str
    #: Names the fetch in all of its lines; Ollama's program draws a bar for each digest.
    digest: str | UnsetType = UNSET
    #: Bytes of the files that are fetched.
    total: int | UnsetType = UNSET
    #: Bytes of them that are here.
    completed: int | UnsetType = UNSET


class PullRequest(NamesModel):
    """The body of POST /api/pull."""

    hints: ClassVar[frozenset[str]] = frozenset({"insecure", "username", "password"})
    notes: ClassVar[Mapping[str, str]] = {
        "model": "a hub id, or a name of Ollama's library",
        "stream": "false: one object; else a line for each step",
    }

    stream: bool = True


class DeleteRequest(NamesModel):
    """The body of DELETE /api/delete."""

    notes: ClassVar[Mapping[str, str]] = {"model": "the name that was pulled"}


@router.post(
    "/api/pull",
    responses=answers(OllamaStatus, streams=True, stream_type=NDJSON, errors=ERROR_RESPONSES),
)
async def ollama_pull(body: PullRequest, http: HTTPRequest) -> Response:
    """Fetch a model into the cache; a served model is there already."""
    shared, name = models_of(http).shared, body.named
    if name is None or _is_among(visible_models(http), name):
        lines = _served()
    else:
        lines = _fetched(_store_of(http, shared, name), name)
    if body.stream:
        return EventStream(
            lines,
            shared.keep_alive_s,
            end=b"",
            keep_alive=b" ",  # JSON may begin with spaces
            media_type=NDJSON,
            error_event=_error_line,
        )
    try:
        await unless_disconnected(http.receive, _exhaust(lines))
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE_STATUS)
    return json_response(OllamaStatus("success"))


@router.delete(DELETE, responses=ERROR_RESPONSES)
async def ollama_delete(body: DeleteRequest, http: HTTPRequest) -> Response:
    """Remove a model that is not served from the cache."""
    name = body.named
    if name is None:
        raise InvalidRequestError("model is missing", "model")
    store = _store_of(http, models_of(http).shared, name)
    if _is_among(models_of(http).all, name):
        raise ModelChangeError(f"the model {name!r:.80} is served, so its files must stay", 409)
    await store.remove(name)
    return Response()


for _path in ("/api/create", "/api/copy", "/api/push"):
    router.refuse(_path)


def _is_among(models: Iterable[HostedModel], name: str) -> bool:
    return any(name in model.all_names for model in models)


def _store_of(http: HTTPRequest, shared: SharedState, name: str) -> ModelStore:
    """The models of this machine. Raises OperatorOnlyError for a tenant, NotSupportedError on a
    server that changes no models."""
    if not http.state.is_operator:
        raise OperatorOnlyError(
            f"{name!r:.80} is not served here, and models are fetched for the operator alone"
        )
    if shared.model_store is None:
        raise NotSupportedError(
            f"{http.url.path} changes no models here, and {name!r:.80} is not served; start the"
            " server with --manage-models, or use quire pull and quire rm on its machine"
        )
    shared.check_accepting()
    return shared.model_store


async def _served() -> AsyncGenerator[bytes, None]:
    for status in ("pulling manifest", "success"):
        yield _line(OllamaStatus(status))


async def _fetched(store: ModelStore, name: str) -> AsyncGenerator[bytes, None]:
    """The lines of a fetch. Raises ModelChangeError."""
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    yield _line(OllamaStatus("pulling manifest"))
    async with aclosing(store.pull(name)) as progress:
        async for num_present, num_bytes in progress:
            yield _line(OllamaStatus(f"pulling {name}", digest, num_bytes, num_present))
    yield _line(OllamaStatus("success"))


async def _exhaust(lines: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass


def _line(status: OllamaStatus) -> bytes:
    return msgspec.json.encode(status) + b"\n"


def _error_line(error: QuireError) -> bytes:
    return msgspec.json.encode(error_body(error, ollama_error)) + b"\n"
