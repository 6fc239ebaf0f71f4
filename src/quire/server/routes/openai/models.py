"""GET /v1/models: the served models, in OpenAI's form or Anthropic's.

Both APIs have this path. Anthropic's clients are recognized by the header `anthropic-version`,
which each of their calls has.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.service import Service, service_of

router = Endpoints()

ANTHROPIC_HEADER = "anthropic-version"


class ModelCard(msgspec.Struct):
    """A model in OpenAI's form."""

    id: str
    created: int
    #: Maximum number of tokens of a prompt and its answer together.
    max_model_len: int
    #: The folder of an adapter, or the name of the model.
    root: str
    #: Name of the model that an adapter modifies; null for the model itself.
    parent: str | None = None
    object: str = "model"
    owned_by: str = "quire"


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: str = "list"


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model"):
    """A model in Anthropic's form."""

    id: str
    display_name: str
    created_at: str
    #: Maximum number of tokens of a prompt and its answer together.
    max_input_tokens: int
    #: Maximum number of tokens of an answer.
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class AnthropicModels(msgspec.Struct):
    """All served models, on one page."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(http: HTTPRequest) -> Response:
    """The server's model under each of its names, and the adapters."""
    service = service_of(http)
    names = [*service.model_names, *(each.name for each in service.adapters.listed())]
    if ANTHROPIC_HEADER in http.headers:
        found = [_anthropic_model(service, name) for name in names]
        return json_response(AnthropicModels(found, found[0].id, found[-1].id))
    return json_response(ModelList([_card(service, name) for name in names]))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, http: HTTPRequest) -> Response:
    """The model, or adapter, called `name`."""
    service = service_of(http)
    service.check_model(name)
    if ANTHROPIC_HEADER in http.headers:
        return json_response(_anthropic_model(service, name))
    return json_response(_card(service, name))


def _anthropic_model(service: Service, name: str) -> AnthropicModel:
    created_at = datetime.fromtimestamp(service.created_s, UTC).isoformat()
    longest = service.engine.limits.max_model_len
    return AnthropicModel(name, name, created_at, longest, longest - 1)


def _card(service: Service, name: str) -> ModelCard:
    longest, adapter = service.engine.limits.max_model_len, service.adapters.get(name)
    if adapter is None:
        return ModelCard(name, service.created_s, longest, name)
    return ModelCard(name, adapter.created_s, longest, adapter.path, service.model_name)
