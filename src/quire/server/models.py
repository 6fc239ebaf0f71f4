"""GET /v1/models: what is served here."""

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from quire.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(http: HTTPRequest) -> dict[str, Any]:
    """The one model of this server."""
    return {"object": "list", "data": [_card(service_of(http))]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, http: HTTPRequest) -> dict[str, Any]:
    """The model called `name`."""
    service = service_of(http)
    service.check_model(name)
    return _card(service)


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "quire",
        "max_model_len": service.engine.limits.max_model_len,
    }
