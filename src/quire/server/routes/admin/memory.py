"""GET /memory and /memory/blocks: the use of the KV memory, for the operator only.

The answers name requests and tenants and show the memory that each holds, so `http.guard` refuses
other callers.
"""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HTTPRequest

from quire.engine_client.device_ledger import ledger_parts
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.messages import GetBlocks, GetMemory
from quire.errors import InvalidRequestError
from quire.server.routes.admin.health import ENGINE_TIMEOUT_S
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import service_named

router = Endpoints(is_suggested=False, operator_paths=("/memory",), responses=ERROR_RESPONSES)

MAX_NUM_BLOCKS = 10_000
"""Maximum number of blocks in one answer: about 1 MiB of JSON if no block has several owners."""

DEFAULT_NUM_BLOCKS = 1000

MAX_BLOCK = 2**31 - 1


@router.get("/memory")
async def memory(
    http: HTTPRequest, replica: str | None = None, model: str | None = None
) -> dict[str, Any]:
    """Bytes of the KV cache by their use (see `core.memory.memory_report`).

    `tiers` has the counts of loads from and stores to the tiers behind the cache (see
    `BlockMoves.counts`), empty without tiers. `device` has the uses of the device's memory (see
    `engine_client.device_ledger`). `replica` names a replica of a fleet; by default the first ready
    one answers. `model` names one of several models. Raises EngineDeadError, which is 503,
    InvalidRequestError for an unknown replica, UnknownModelError, and ModelNotLoadedError.
    """
    check_query(http, ("replica", "model"))
    engine = find_engine(http, replica, model)
    report = await engine.ask(GetMemory(), ENGINE_TIMEOUT_S)
    parts = ledger_parts(engine.facts)
    return report | {"device": {f"{name}_bytes": count for name, count in parts.items()}}


@router.get("/memory/blocks")
async def memory_blocks(
    http: HTTPRequest,
    first_block: str = "0",
    num_blocks: str = str(DEFAULT_NUM_BLOCKS),
    replica: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """The uses of `num_blocks` blocks from `first_block` on (see `block_map`), as one page.

    `next_block` is the first block of the next page, null at the end of the pool. Raises
    InvalidRequestError for a page beyond the pool, and the errors of /memory.
    """
    check_query(http, ("first_block", "num_blocks", "replica", "model"))
    first = _whole_number("first_block", first_block, 0, MAX_BLOCK)
    count = _whole_number("num_blocks", num_blocks, 1, MAX_NUM_BLOCKS)
    page = await find_engine(http, replica, model).ask(GetBlocks(first, count), ENGINE_TIMEOUT_S)
    last = page["num_blocks"] - 1
    if first > last:
        raise InvalidRequestError(
            f"first_block is {first}, but the pool has blocks 0 to {last}", "first_block"
        )
    return page


def find_engine(
    http: HTTPRequest, replica: str | None, model: str | None = None
) -> EngineFleet | FleetEngine:
    """The engine to ask: a named replica, or the fleet, of which the first ready one answers.

    `model` names one of several models. Raises InvalidRequestError for an unknown replica,
    UnknownModelError, ModelNotLoadedError.
    """
    engine = service_named(http, model).engine
    if replica is None:
        return engine
    if not replica or replica not in engine.engines_by_name:
        names = ", ".join(name for name in engine.engines_by_name if name) or "none"
        raise InvalidRequestError(f"replica is {replica!r:.40}, but there are: {names}", "replica")
    return engine.engines_by_name[replica]


def _whole_number(name: str, text: str, low: int, high: int) -> int:
    number = int(text) if text.isdecimal() and len(text) <= len(str(high)) else -1
    if not low <= number <= high:
        raise InvalidRequestError(
            f"{name} is {text!r:.40}, but must be a whole number from {low} to {high}", name
        )
    return number


def check_query(http: HTTPRequest, known: Iterable[str]) -> None:
    """Raises InvalidRequestError if the call's query has other parameters than the known ones."""
    unknown = sorted(set(http.query_params) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"{unknown[0]} is not a parameter of {http.url.path}; known are:"
            f" {', '.join(known) or 'none'}",
            unknown[0],
        )
