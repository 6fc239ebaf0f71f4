"""GET /v1/models: the served models, in OpenAI's form or Anthropic's.

Both APIs have this path. Anthropic's clients are recognized by the header `anthropic-version`,
which each of their calls has.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.server.hosted_model import HostedModel
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.served_models import find_model, models_of, visible_models

router = Endpoints()

ANTHROPIC_HEADER = "anthropic-version"


class ModelCard(msgspec.Struct):
    """A model in OpenAI's form."""

    id: str
    created: int
    #: Maximum number of tokens of a prompt and its answer together; null before the first load.
    max_model_len: int | None
    #: The folder of an adapter, or the name of the model.
    root: str
    #: Name of the model that an adapter modifies; null for the model itself.
    parent: str | None = None
    object: str = "model"
    owned_by: str = "quire"
    #: Whether one of several models is in memory: unloaded, loading, loaded, unloading, recovering
    #: or failed.
    state: str | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: str = "list"


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model"):
    """A model in Anthropic's form."""

    id: str
    display_name: str
    created_at: str
    #: Maximum number of tokens of a prompt and its answer together; null before the first load.
    max_input_tokens: int | None
    #: Maximum number of tokens of an answer; null before the first load.
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"


class AnthropicModels(msgspec.Struct):
    """All served models, on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(http: HTTPRequest) -> Response:
    """The server's models under each of their names, and the adapters."""
    named = [(model, name) for model in visible_models(http) for name in model.all_names]
    if ANTHROPIC_HEADER in http.headers:
        found = [_anthropic_model(model, name) for model, name in named]
        first_id, last_id = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(AnthropicModels(found, first_id, last_id))
    is_one = models_of(http).room is None
    return json_response(ModelList([_card(model, name, is_one) for model, name in named]))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, http: HTTPRequest) -> Response:
    """The model, or adapter, called `name`."""
    model = find_model(http, name)
    if ANTHROPIC_HEADER in http.headers:
        return json_response(_anthropic_model(model, name))
    return json_response(_card(model, name, models_of(http).room is None))


def _anthropic_model(model: HostedModel, name: str) -> AnthropicModel:
    created_at = datetime.fromtimestamp(model.created_s, UTC).isoformat()
    longest = _longest(model)
    return AnthropicModel(name, name, created_at, longest, None if longest is None else longest - 1)


def _card(model: HostedModel, name: str, is_one: bool) -> ModelCard:
    """A card of a model or an adapter; `is_one` if the server has no other model."""
    service, longest = model.service, _longest(model)
    adapter = None if service is None else service.adapters.get(name)
    card = ModelCard(name, model.created_s, longest, name, state=UNSET if is_one else model.state)
    if adapter is not None:
        card.created, card.root = adapter.created_s, adapter.path
    if name in model.adapter_names:
        card.parent = model.name
    return card


def _longest(model: HostedModel) -> int | None:
    return None if model.service is None else model.service.engine.limits.max_model_len
