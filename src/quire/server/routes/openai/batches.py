"""/v1/batches: answers files of calls in the background."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.errors import InvalidRequestError, QuireError, did_you_mean
from quire.server.batch.batch_book import Batch
from quire.server.http.body import Body
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints, refuse_unasked_page
from quire.server.routes.openai.responses.conversation import answer_owner
from quire.server.routes.openai.uploaded_files import batches_of, find_file, page_of
from quire.server.routes.openapi import answers
from quire.server.served_models import models_of

BATCHES = "/v1/batches"

router = Endpoints(is_suggested=False)

MAX_LISTED = 100
MAX_WINDOW_H = 24 * 30
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512
"""Bounds of the metadata: its number of fields, and the lengths of their names and values."""

_WINDOW = re.compile(r"([1-9][0-9]{0,3})h")


class UnknownBatchError(QuireError):
    """The caller has no batch of this id."""

    http_status = 404
    code = "batch_not_found"
    param = "batch_id"


class BatchRequest(Body):
    """The body of POST /v1/batches."""

    notes: ClassVar[Mapping[str, str]] = {
        "input_file_id": "the id of a file with one call a line",
        "endpoint": "the path that all calls of the file have",
        "completion_window": "the hours after which no more calls are answered: `24h`, or another"
        f" number up to {MAX_WINDOW_H}",
        "metadata": "up to 16 texts by name, kept with the batch",
    }
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"output_expires_after": ()}

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None

    @property
    def window_s(self) -> int:
        """The window in seconds. Raises InvalidRequestError."""
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None or int(found[1]) > MAX_WINDOW_H:
            raise InvalidRequestError(
                f"completion_window is {self.completion_window!r:.80}, but must be 24h, or another"
                f" number of hours from 1h to {MAX_WINDOW_H}h",
                "completion_window",
            )
        return int(found[1]) * 3600

    def check_metadata(self) -> None:
        """Raises InvalidRequestError."""
        given = self.metadata or {}
        names, values = max(map(len, given), default=0), max(map(len, given.values()), default=0)
        if len(given) > MAX_METADATA or names > MAX_KEY_CHARACTERS or values > MAX_VALUE_CHARACTERS:
            raise InvalidRequestError(
                f"metadata may have {MAX_METADATA} fields, with names of {MAX_KEY_CHARACTERS} and"
                f" texts of {MAX_VALUE_CHARACTERS} characters at most",
                "metadata",
            )


class BatchList(msgspec.Struct):
    """A page of batches."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    #: Whether there are batches after last_id.
    has_more: bool
    object: Literal["list"] = "list"


@router.post(BATCHES, responses=answers(Batch))
async def create_batch(body: BatchRequest, http: HTTPRequest) -> Response:
    """Answer the calls of a file in the background."""
    book = batches_of(http)
    models_of(http).shared.check_accepting()
    paths: list[str] = http.app.state.batch_paths
    if body.endpoint not in paths:
        raise InvalidRequestError(
            f"endpoint is {body.endpoint!r:.80}{did_you_mean(body.endpoint, paths)}; a batch may"
            f" call {', '.join(sorted(paths))}",
            "endpoint",
        )
    body.check_metadata()
    file = find_file(http, body.input_file_id)
    return json_response(
        book.create(answer_owner(http), body.endpoint, file.id, body.window_s, body.metadata)
    )


@router.get(BATCHES, responses=answers(BatchList))
async def list_batches(
    http: HTTPRequest,
    after: str | None = None,
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20,
) -> Response:
    """The caller's batches, the newest first."""
    batches = batches_of(http).listed(answer_owner(http))[::-1]
    page, has_more = page_of(batches, after, limit)
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(BatchList(page, first_id, last_id, has_more))


@router.get(f"{BATCHES}/{{batch_id}}", responses=answers(Batch))
async def get_batch(batch_id: str, http: HTTPRequest) -> Response:
    """The state of a batch."""
    return json_response(_found(http, batch_id))


@router.post(f"{BATCHES}/{{batch_id}}/cancel", responses=answers(Batch))
async def cancel_batch(batch_id: str, http: HTTPRequest) -> Response:
    """End a batch early; its answers so far are kept."""
    refuse_unasked_page(http)
    batch = _found(http, batch_id)
    batches_of(http).cancel(batch)
    return json_response(batch)


def _found(http: HTTPRequest, batch_id: str) -> Batch:
    """The caller's batch of this id. Raises UnknownBatchError."""
    batch = batches_of(http).find(answer_owner(http), batch_id)
    if batch is None:
        raise UnknownBatchError(f"there is no batch {batch_id!r:.80}; see GET {BATCHES}")
    return batch
