"""GET /v1/models: what is served here."""

import msgspec
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.service import Service, service_of

router = Endpoints()


class ModelCard(msgspec.Struct):
    """A model. max_model_len: how many tokens a prompt and its answer may have together."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "quire"


class ModelList(msgspec.Struct):
    """All models."""

    data: list[ModelCard]
    object: str = "list"


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(http: HTTPRequest) -> Response:
    """The one model of this server, under each of its names."""
    service = service_of(http)
    return json_response(ModelList([_card(service, name) for name in service.model_names]))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, http: HTTPRequest) -> Response:
    """The model called `name`."""
    service = service_of(http)
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(name, service.created_s, service.engine.limits.max_model_len)
