"""The served models in Ollama's form: GET /api/tags, /api/ps and /api/version, POST /api/show.

`model_changes` fetches and removes models of the machine, which are not served.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import field_validator
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.server.generation.chat_call import ReasoningOptions
from quire.server.generation.chat_prompt import reasoning_variables
from quire.server.hosted_model import HostedModel, Phase
from quire.server.http.body import Body, UnknownFields
from quire.server.http.streaming import json_response
from quire.server.routes.ollama.ollama_body import without_tag
from quire.server.routes.ollama.ollama_endpoints import OllamaEndpoints
from quire.server.routes.openapi import answers, error_responses
from quire.server.served_models import find_model, models_of, visible_models
from quire.server.service import Service
from quire.text.fill_in_middle import FillInMiddle
from quire.version import __version__

ERROR_RESPONSES = error_responses(
    {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
)


router = OllamaEndpoints()

ARCHITECTURE = "quire"
"""Prefix of the names in `model_info`, since clients read `<architecture>.context_length`."""


FOR_GOOD = "9999-12-31T23:59:59Z"
"""The expiry of a model that stays in memory."""

MAX_SHOWN_S = 1e9
"""Seconds, about 30 years. A model with more of them left is shown as one that stays."""


class OllamaDetails(msgspec.Struct):
    """Ollama's details of a model file. Most are empty, since quire's models are folders."""

    parent_model: str = ""
    format: str = ""
    family: str = ARCHITECTURE
    families: list[str] = msgspec.field(default_factory=lambda: [ARCHITECTURE])
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    #: A SHA-256 of the name and the engine's fingerprint. Ollama's `list` and `ps` fail without it.
    digest: str
    #: Bytes of the weights; for an adapter, the bytes of its model's weights.
    size: int
    details: OllamaDetails = msgspec.field(default_factory=OllamaDetails)
    #: Whether one of several models is in memory, as in /v1/models.
    state: str | UnsetType = UNSET


class OllamaRunning(OllamaModel, kw_only=True):
    """A model in memory."""

    #: The part of `size` in a GPU's memory.
    size_vram: int
    #: The model's maximum number of tokens of a sequence.
    context_length: int
    #: When the model leaves the memory if no call comes.
    expires_at: str = FOR_GOOD


class OllamaRunningModels(msgspec.Struct):
    """All models in memory."""

    models: list[OllamaRunning]


class OllamaModels(msgspec.Struct):
    """All served models."""

    models: list[OllamaModel]


class OllamaVersion(msgspec.Struct):
    """The version of the server."""

    version: str


class OllamaShow(msgspec.Struct):
    """A model in Ollama's form. Its capabilities are "completion", "tools", "thinking", "vision"
    (images) and "insert" (a suffix), or "embedding"."""

    modified_at: str
    capabilities: list[str]
    model_info: dict[str, Any]
    #: The chat template, in Jinja.
    template: str
    details: OllamaDetails = msgspec.field(default_factory=OllamaDetails)
    #: Contents of Ollama's own model files; always empty.
    parameters: str = ""
    modelfile: str = ""


class NamesModel(Body):
    """The fields that the bodies of /api/show, /api/pull and /api/delete share."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/api/tags`, with or without `:latest`",
        "name": "older name of `model`",
    }

    model: str | None = None
    #: The older name of `model`.
    name: str | None = None

    @field_validator("model", "name")
    @classmethod
    def _without_tag(cls, name: str | None) -> str | None:
        return without_tag(name)

    @classmethod
    def needs_model(cls, fields: Mapping[str, Any]) -> bool:
        return False

    @property
    def named(self) -> str | None:
        """The model's name; None if the body has none."""
        return self.name if self.model is None else self.model


class ShowRequest(NamesModel):
    """The body of POST /api/show."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbose"})


@router.get("/api/tags", responses=answers(OllamaModels, errors=ERROR_RESPONSES))
async def ollama_tags(http: HTTPRequest) -> Response:
    """The models of this server under their first names, and their adapters."""
    found = []
    for model in visible_models(http):
        state = UNSET if models_of(http).room is None else model.state
        for name in (model.name, *model.adapter_names):
            adapter = None if model.service is None else model.service.adapters.get(name)
            listed = OllamaModel(
                name,
                name,
                rfc3339(model.created_s if adapter is None else adapter.created_s),
                _digest(model, name),
                _num_weight_bytes(model),
                state=state,
            )
            if name != model.name:
                listed.details = OllamaDetails(parent_model=model.name)
            found.append(listed)
    return json_response(OllamaModels(found))


@router.post("/api/show", responses=answers(OllamaShow, errors=ERROR_RESPONSES))
async def ollama_show(body: ShowRequest, http: HTTPRequest) -> Response:
    """The details of a model. They are incomplete if the model was never loaded."""
    model = find_model(http, body.named)
    service = model.service
    info: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "general.basename": model.name,
    }
    if service is None:
        return json_response(OllamaShow(rfc3339(model.created_s), ["completion"], info, ""))
    limits = service.engine.limits
    info |= {
        f"{ARCHITECTURE}.context_length": limits.max_model_len,
        f"{ARCHITECTURE}.embedding_length": int(service.engine.facts.get("hidden_size") or 0),
        f"{ARCHITECTURE}.vocab_size": limits.vocab_size,
    }
    template = service.chat_template.source_for_tools or ""
    return json_response(
        OllamaShow(rfc3339(model.created_s), _capabilities(service), info, template)
    )


@router.get("/api/ps", responses=answers(OllamaRunningModels, errors=ERROR_RESPONSES))
async def ollama_running(http: HTTPRequest) -> Response:
    """The models in memory."""
    found = []
    for model in visible_models(http):
        service, size = model.service, _num_weight_bytes(model)
        is_here = service is not None and model.phase is Phase.LOADED
        if service is None or not is_here or service.engine.sleeping.is_on:
            continue
        found.append(
            OllamaRunning(
                model.name,
                model.name,
                rfc3339(model.created_s),
                _digest(model, model.name),
                size,
                size_vram=size if "device_memory_bytes" in service.engine.facts else 0,
                context_length=service.engine.limits.max_model_len,
                expires_at=_expiry(service),
            )
        )
    return json_response(OllamaRunningModels(found))


@router.get("/api/version", responses=answers(OllamaVersion, errors=ERROR_RESPONSES))
async def ollama_version() -> Response:
    """The version of the server."""
    return json_response(OllamaVersion(__version__))


def _digest(model: HostedModel, name: str) -> str:
    """A hash that stays the same while the model is loaded and unloaded."""
    service = model.service if model.loader is None else None
    fingerprint = model.name if service is None else service.engine.facts.get("fingerprint")
    return hashlib.sha256(f"{name} {fingerprint}".encode()).hexdigest()


def _num_weight_bytes(model: HostedModel) -> int:
    """Bytes of the weights; before the first load, the bytes that the model is expected to take."""
    service = model.service
    if service is None:
        return model.needed_bytes or 0
    return int(service.engine.facts.get("weight_bytes") or 0)


def _expiry(service: Service) -> str:
    """When the idle model leaves the memory."""
    left_s = math.inf if service.idle_unload is None else service.idle_unload.seconds_left
    return FOR_GOOD if left_s > MAX_SHOWN_S else rfc3339(time.time() + left_s)


def rfc3339(time_s: float) -> str:
    """Format seconds since 1970 by RFC 3339."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")


def _capabilities(service: Service) -> list[str]:
    if not service.engine.limits.generates:
        return ["embedding"]
    template = service.chat_template
    insert = ["insert"] if FillInMiddle(service.tokenizer).format is not None else []
    if not template.exists:
        return ["completion", *insert]
    asked = ReasoningOptions(effort="high", is_enabled=True)
    thinking = reasoning_variables(template, asked, has_tools=False)
    wanted = {"thinking": bool(thinking), "vision": service.image_reader is not None}
    return ["completion", "tools", *(name for name, has in wanted.items() if has), *insert]
