"""GET /version: the version of quire that serves here."""

import msgspec
from starlette.responses import Response

from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.version import __version__

router = Endpoints(is_suggested=False)


class Version(msgspec.Struct):
    """The version of quire."""

    version: str


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    """The version of the server."""
    return json_response(Version(__version__))
