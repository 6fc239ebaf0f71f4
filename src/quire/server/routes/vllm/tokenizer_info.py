"""GET /tokenizer_info: the tokenizer's configuration in the model's folder, in vLLM's form."""

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.service import service_of

router = Endpoints()

SCHEMA = {"type": "object"}
ANSWERS: dict[int | str, Any] = {
    200: {"description": "the fields", "content": {"application/json": {"schema": SCHEMA}}},
    **ERROR_RESPONSES,
}


@router.get("/tokenizer_info", responses=ANSWERS)
async def tokenizer_info(http: HTTPRequest) -> Response:
    """The unchanged fields of tokenizer_config.json."""
    return JSONResponse(dict(service_of(http).tokenizer_fields))
