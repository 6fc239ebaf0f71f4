"""POST /sleep and /wake_up, GET /is_sleeping: release the engine's memory, and load it again.

The paths and fields are those of vLLM, for the operator. At level 1, a process with the engine's
libraries stays, so that waking up takes less time; at level 2 nothing stays. At both levels the
weights are read again from the model's files, which the system may still have in memory.
"""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.fleet_sleep import WAIT_S, SleepMode
from quire.errors import InvalidRequestError
from quire.server.hosted_model import Phase
from quire.server.routes.endpoint import Endpoints, refuse_unasked_page
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import find_model, models_of

SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"

router = Endpoints(
    is_suggested=False,
    operator_paths=(SLEEP, WAKE_UP, IS_SLEEPING),
    responses=ERROR_RESPONSES,
)


@router.post(SLEEP)
async def put_to_sleep(
    http: HTTPRequest,
    level: Annotated[int, Field(ge=1, le=2)] = 1,
    mode: SleepMode = "abort",
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = WAIT_S,
    model: str | None = None,
) -> Response:
    """Release the memory of weights and KV cache; answers when it is free.

    Requests that are open end with an error (`mode` is `abort`), are waited for (`wait`), or go on
    after the wake-up (`keep`). A wait ends with 408 after `timeout_s` seconds: the engine stays
    awake. `model` names one of several models, which is unloaded until the next call.
    """
    refuse_unasked_page(http)
    models = models_of(http)
    models.shared.check_accepting()
    found = find_model(http, model)
    if models.room is not None:
        await models.room.unload(found, mode, timeout_s)
    else:
        sleeping = models.default_service.engine.sleeping
        await sleeping.sleep(mode, keeps_process=level == 1, wait_s=timeout_s)
    return Response()


@router.post(WAKE_UP)
async def wake_up(http: HTTPRequest, tags: str | None = None, model: str | None = None) -> Response:
    """Load the model again; answers when requests are taken. `model` names one of several."""
    refuse_unasked_page(http)
    if tags is not None:
        raise InvalidRequestError(
            "tags is set, but weights and KV cache wake up together; leave it out", "tags"
        )
    models = models_of(http)
    models.shared.check_accepting()
    found = find_model(http, model)
    if models.room is not None:
        await models.enter(http, found)
    else:
        await models.default_service.engine.sleeping.wake()
    return Response()


@router.get(IS_SLEEPING)
async def is_sleeping(http: HTTPRequest, model: str | None = None) -> dict[str, bool]:
    """Whether the engine sleeps, or one of several models is not in memory."""
    found = find_model(http, model)
    if found.service is None or found.phase is not Phase.LOADED:
        return {"is_sleeping": True}
    return {"is_sleeping": found.service.engine.sleeping.is_on}
