"""/v1/files: uploads the calls of batches, and lists, reads and deletes files."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response

from quire.errors import InvalidRequestError, QuireError
from quire.server.batch.batch_book import Batch, BatchBook
from quire.server.batch.file_store import FileUpload, StoredFile
from quire.server.http.errors import CLIENT_GONE_STATUS
from quire.server.http.multipart import Form, FormReader
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints, refuse_unasked_page
from quire.server.routes.openai.responses.conversation import answer_owner
from quire.server.routes.openapi import ERROR_RESPONSES, answers
from quire.server.routes.unsupported import NotSupportedError
from quire.server.served_models import models_of

FILES = "/v1/files"

BYTES = "application/octet-stream"

router = Endpoints(is_suggested=False, upload_paths=(FILES,))

MAX_LISTED = 10_000

CONTENT_RESPONSES: Mapping[int | str, Any] = {
    200: {"description": "the bytes of the file", "content": {BYTES: {"schema": {}}}},
    **ERROR_RESPONSES,
}

Listed = TypeVar("Listed", StoredFile, Batch)


class UnknownFileError(QuireError):
    """The caller has no file of this id."""

    http_status = 404
    code = "file_not_found"
    param = "file_id"


class FileList(msgspec.Struct):
    """A page of files."""

    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    #: Whether there are files after last_id.
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    """The id of a file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def batches_of(http: HTTPRequest) -> BatchBook:
    """The server's batches. Raises NotSupportedError on a server without a folder for them."""
    book = models_of(http).shared.batches
    if book is None:
        raise NotSupportedError(
            f"{http.url.path:.80} is off on this server, which has no folder for batches; it is"
            " started with --batch-dir DIR"
        )
    return book


@router.post(FILES, responses=answers(StoredFile))
async def upload_file(http: HTTPRequest) -> Response:
    """Store a file of calls, as multipart/form-data with the fields `file` and `purpose`, which is
    `batch`."""
    book, owner = batches_of(http), answer_owner(http)
    refuse_unasked_page(http)
    models_of(http).shared.check_accepting()
    with FileUpload(book.files, owner) as upload:
        reader = FormReader(http.headers.get("content-type", ""), "file", upload.write)
        try:
            form = await reader.read(http.stream())
        except ClientDisconnect:  # the client left while it sent its file
            return Response(status_code=CLIENT_GONE_STATUS)
        _check_form(form)
        return json_response(upload.finish(form.filename or upload.file_id, "batch"))


def _check_form(form: Form) -> None:
    """Raises InvalidRequestError."""
    if form.filename is None:
        raise InvalidRequestError("the form has no field 'file'", "file")
    for name, value in form.fields.items():
        if name != "purpose":
            raise InvalidRequestError(f"the field {name!r:.80} is not supported", name[:80])
        if value != "batch":
            raise InvalidRequestError(
                f"purpose is {value!r:.80}, but this server takes files for batches alone: batch",
                "purpose",
            )
    if "purpose" not in form.fields:
        raise InvalidRequestError("the form has no field 'purpose'; send batch", "purpose")


@router.get(FILES, responses=answers(FileList))
async def list_files(
    http: HTTPRequest,
    after: str | None = None,
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """The caller's files, the newest first unless `order` is "asc"."""
    files = batches_of(http).files.listed(answer_owner(http))
    if order == "desc":
        files.reverse()
    files = [file for file in files if purpose in (None, file.purpose)]
    page, has_more = page_of(files, after, limit)
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(FileList(page, first_id, last_id, has_more))


def page_of(items: list[Listed], after: str | None, limit: int) -> tuple[list[Listed], bool]:
    """At most `limit` items after the one with the id `after`, and whether more follow. Raises
    InvalidRequestError for an unknown id."""
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidRequestError(f"there is no {after!r:.80} in this list", "after")
        items = items[ids.index(after) + 1 :]
    return items[:limit], len(items) > limit


@router.get(f"{FILES}/{{file_id}}", responses=answers(StoredFile))
async def get_file(file_id: str, http: HTTPRequest) -> Response:
    """The caller's file of this id, without its content."""
    return json_response(find_file(http, file_id))


@router.get(f"{FILES}/{{file_id}}/content", responses=CONTENT_RESPONSES)
async def get_file_content(file_id: str, http: HTTPRequest) -> Response:
    """The content of a file."""
    file = find_file(http, file_id)
    path = batches_of(http).files.path_of(file.id)
    return FileResponse(path, media_type=BYTES)


@router.delete(f"{FILES}/{{file_id}}", responses=answers(DeletedFile))
async def delete_file(file_id: str, http: HTTPRequest) -> Response:
    """Delete a file that no unfinished batch reads."""
    file, book = find_file(http, file_id), batches_of(http)
    if book.is_in_use(file.id):
        raise InvalidRequestError(
            f"a batch that has not ended reads the file {file.id}; cancel it first", "file_id"
        )
    book.files.delete(file.id)
    return json_response(DeletedFile(file.id))


def find_file(http: HTTPRequest, file_id: str) -> StoredFile:
    """The caller's file of this id. Raises UnknownFileError."""
    file = batches_of(http).files.find(answer_owner(http), file_id)
    if file is None:
        raise UnknownFileError(f"there is no file {file_id!r:.80}; see GET {FILES}")
    return file
