"""GET /v1/uptime: which model is served, and since when."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.service import service_of

router = Endpoints()


class Uptime(msgspec.Struct):
    """The answer of /v1/uptime."""

    model: str
    #: Time at which the server was started, in seconds since the epoch.
    created_s: int


@router.get("/v1/uptime", responses=answers(Uptime))
async def uptime(http: Request) -> Response:
    """When the server was started."""
    service = service_of(http)
    return json_response(Uptime(service.model_name, service.created_s))
