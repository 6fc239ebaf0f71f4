"""GET /tokenizer_info: the tokenizer's configuration in the model's folder, in vLLM's form."""

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import service_named

router = Endpoints()

SCHEMA = {"type": "object"}
ANSWERS: dict[int | str, Any] = {
    200: {"description": "the fields", "content": {"application/json": {"schema": SCHEMA}}},
    **ERROR_RESPONSES,
}


@router.get("/tokenizer_info", responses=ANSWERS)
async def tokenizer_info(http: HTTPRequest, model: str | None = None) -> Response:
    """The unchanged fields of tokenizer_config.json. `model` names one of several models."""
    return JSONResponse(dict(service_named(http, model).tokenizer_fields))
