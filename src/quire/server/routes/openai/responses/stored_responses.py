"""/v1/responses/...: reads and deletes stored responses, and counts an input's tokens."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.errors import InvalidRequestError, QuireError
from quire.server.generation.answer_store import StoredAnswer
from quire.server.generation.chat_prompt import chat_call_of, chat_prompt
from quire.server.generation.http_generation import fields_named
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.responses.conversation import (
    HOW_TO_STORE,
    Conversation,
    answer_owner,
)
from quire.server.routes.openai.responses.request_body import FIELD_NAMES, InputTokensRequest
from quire.server.routes.openai.responses.response_object import ResponseObject
from quire.server.routes.openapi import answers
from quire.server.served_models import models_of
from quire.server.service import report_ignored_fields, service_of

router = Endpoints()

MAX_LISTED = 100


class UnknownResponseError(QuireError):
    """A response was never stored here, or has been dropped."""

    http_status = 404
    code = "not_found"
    param = "response_id"


class InputTokens(msgspec.Struct):
    """The number of tokens of an input: `usage.input_tokens` of a call with this input."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """The id of a response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct):
    """A page of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    #: Whether there are items after last_id.
    has_more: bool
    object: Literal["list"] = "list"


@router.post("/v1/responses/input_tokens", responses=answers(InputTokens))
async def count_input_tokens(body: InputTokensRequest, http: HTTPRequest) -> Response:
    """Count the tokens of an input, including its tools and instructions."""
    service = service_of(http)
    service.check_model(body.model)
    body.continue_conversation(await Conversation.of(http, body.previous_response_id))
    report_ignored_fields(http, body.tool_names.left_out)
    with fields_named(FIELD_NAMES):
        prompt = await chat_prompt(service, await chat_call_of(service, body))
    service.report_or_refuse_fields(http, prompt.left_out)
    num_tokens, longest = len(prompt.token_ids), service.engine.limits.max_model_len
    is_cut = body.truncation == "auto"
    return json_response(InputTokens(min(num_tokens, longest - 1) if is_cut else num_tokens))


router.refuse("/v1/responses/compact")


@router.get("/v1/responses/{response_id}", responses=answers(ResponseObject))
async def get_response(response_id: str, http: HTTPRequest, stream: str = "false") -> Response:
    """A stored response."""
    if stream != "false":
        raise InvalidRequestError(
            "a stored response is not streamed again; leave stream out", "stream"
        )
    return Response(_stored(http, response_id).answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse))
async def delete_response(response_id: str, http: HTTPRequest) -> Response:
    """Delete a response. Later responses of its conversation can then not be continued either."""
    _stored(http, response_id)
    models_of(http).shared.answers.drop(answer_owner(http), response_id)
    return json_response(DeletedResponse(response_id))


@router.get("/v1/responses/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(
    response_id: str,
    http: HTTPRequest,
    after: str | None = None,
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items before a response, the last one first unless `order` is "asc"."""
    items = await _conversation(http, response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(f"there is no item {after!r:.80} here", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(ItemList(page, first_id, last_id, len(items) > limit))


for path in ("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/{rest:path}"):
    router.refuse(path)


def _stored(http: HTTPRequest, response_id: str) -> StoredAnswer:
    """A stored response. Raises UnknownResponseError."""
    store = models_of(http).shared.answers
    found = store.find(answer_owner(http), response_id)
    if found is None:
        reason = "not stored here, or no longer" if store.is_on else f"not there: {HOW_TO_STORE}"
        raise UnknownResponseError(f"the response {response_id!r:.80} is {reason}")
    return found


async def _conversation(http: HTTPRequest, response_id: str) -> list[dict[str, Any]]:
    """The items before a response: the earlier conversation, and the input of the call."""
    stored = _stored(http, response_id)
    before = stored.previous_id
    history = () if before is None else (await Conversation.of(http, before)).history
    return [*history, *stored.given.read()]
