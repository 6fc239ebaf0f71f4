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
from quire.server.routes.endpoint import Endpoints, refuse_unasked_page
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.service import service_of

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
) -> Response:
    """Release the memory of weights and KV cache; answers when it is free.

    Requests that are open end with an error (`mode` is `abort`), are waited for (`wait`), or go on
    after the wake-up (`keep`). A wait ends with 408 after `timeout_s` seconds: the engine stays
    awake.
    """
    refuse_unasked_page(http)
    service = service_of(http)
    service.check_accepting()
    await service.engine.sleeping.sleep(mode, keeps_process=level == 1, wait_s=timeout_s)
    return Response()


@router.post(WAKE_UP)
async def wake_up(http: HTTPRequest, tags: str | None = None) -> Response:
    """Load the model again; answers when requests are taken."""
    refuse_unasked_page(http)
    if tags is not None:
        raise InvalidRequestError(
            "tags is set, but weights and KV cache wake up together; leave it out", "tags"
        )
    service = service_of(http)
    service.check_accepting()
    await service.engine.sleeping.wake()
    return Response()


@router.get(IS_SLEEPING)
async def is_sleeping(http: HTTPRequest) -> dict[str, bool]:
    """Whether the engine sleeps."""
    return {"is_sleeping": service_of(http).engine.sleeping.is_on}
