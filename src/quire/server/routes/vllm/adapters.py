"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adds and removes adapters at run time.

The API is vLLM's. Only the operator may call it, since it reads folders on the server's machine.
"""

from collections.abc import Mapping
from typing import ClassVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from quire.errors import InvalidRequestError, shown
from quire.server.http.body import Body
from quire.server.routes.endpoint import Endpoints, Responses
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import models_of
from quire.server.service import service_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

router = Endpoints(is_suggested=False, operator_paths=(LOAD, UNLOAD), responses=ERROR_RESPONSES)

TEXT = {"text/plain": {"schema": {"type": "string"}}}
ANSWERS: Responses = {200: {"description": "Successful Response", "content": TEXT}}


class LoadAdapterRequest(Body):
    """The body of POST /v1/load_lora_adapter."""

    notes: ClassVar[Mapping[str, str]] = {
        "model": "the adapter's model, on a server with several",
        "lora_name": "what calls name as their `model`",
        "lora_path": "a folder of the server's machine, as PEFT saves it; read now",
        "load_inplace": "the name may be loaded already: then new calls get this one",
    }

    #: The adapter's model, on a server with several; None means the first.
    model: str | None = None
    lora_name: str
    lora_path: str
    #: Whether the adapter may replace another adapter with the same name.
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """The body of POST /v1/unload_lora_adapter."""

    notes: ClassVar[Mapping[str, str]] = {
        "model": "the adapter's model, on a server with several",
        "lora_name": "a name in `/v1/models`; calls under way go on",
        "lora_int_id": "vLLM's number of the adapter; it is ignored",
    }

    #: The adapter's model, on a server with several; None means the first.
    model: str | None = None
    lora_name: str
    lora_int_id: int | None = None


@router.post(LOAD, ANSWERS)
async def load_lora_adapter(body: LoadAdapterRequest, http: HTTPRequest) -> Response:
    """Read an adapter and serve it under a name."""
    models, service = models_of(http), service_of(http)
    service.check_model(body.model)
    taken = {name for each in models.all if each.service is not service for name in each.all_names}
    if body.lora_name in taken:
        raise InvalidRequestError(
            f"lora_name is {shown(body.lora_name)}, which names another model; choose another",
            "lora_name",
        )
    await service.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(UNLOAD, ANSWERS)
async def unload_lora_adapter(body: UnloadAdapterRequest, http: HTTPRequest) -> Response:
    """Remove an adapter's name."""
    service = service_of(http)
    service.check_model(body.model)
    service.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
