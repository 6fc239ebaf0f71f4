"""GET /health: 200 while the engine takes steps, 503 once it is gone or stuck."""

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from quire.server.service import service_of

router = APIRouter()

ENGINE_TIMEOUT_S = 10.0
"""The engine answers between two steps; a step that takes longer than this counts as stuck."""


@router.get("/health")
async def health(http: HTTPRequest) -> dict[str, Any]:
    """The engine's own numbers. Raises EngineDeadError, which is 503."""
    stats = await service_of(http).engine.stats(ENGINE_TIMEOUT_S)
    return {"status": "ok", "engine": stats}
