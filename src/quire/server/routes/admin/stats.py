"""GET /stats, /stats/events and /stats/table: what the server does now, for the operator only.

The page at `/` and `quire top` read them. Engines collect steps while one of them is asked, and
for some seconds after.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.messages import Observe
from quire.errors import InvalidRequestError
from quire.server.http.streaming import EventStream, event
from quire.server.routes.admin.health import ENGINE_TIMEOUT_S
from quire.server.routes.admin.memory import check_query, find_engine
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import service_named
from quire.server.service import Service
from quire.server.stats.engine_view import PARTS
from quire.version import __version__

router = Endpoints(
    is_suggested=False,
    operator_paths=("/stats",),
    probes=("/stats",),
    responses=ERROR_RESPONSES,
)

DEFAULT_PARTS = "stats,events,requests,memory"

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 10.0
DEFAULT_INTERVAL_S = "0.5"


@router.get("/stats")
async def stats(
    http: HTTPRequest, parts: str = DEFAULT_PARTS, model: str | None = None
) -> dict[str, Any]:
    """The server, its tenants and its engines as they are now (docs/page.md has the fields).

    `parts` names the parts of each engine, separated by commas, and `model` one of several models.
    Raises InvalidRequestError for an unknown part, UnknownModelError, ModelNotLoadedError.
    """
    check_query(http, ("parts", "model"))
    service = service_named(http, model)
    engines = await service.feed.snapshot(service.engine, _parts(parts))
    return _server(service) | {"engines": engines}


@router.route("/stats/events", "GET", include_in_schema=False)  # it does not end
async def stats_events(
    http: HTTPRequest,
    parts: str = DEFAULT_PARTS,
    interval: str = DEFAULT_INTERVAL_S,
    model: str | None = None,
) -> Response:
    """A stream of server-sent events: the first is whole, later ones have what has changed.

    `interval` is the time between two events, from 0.25 to 10 seconds. Raises InvalidRequestError,
    and OverloadedError if too many streams are open.
    """
    check_query(http, ("parts", "interval", "model"))
    service = service_named(http, model)
    chosen, interval_s = _parts(parts), _interval_s(interval)
    return EventStream(_events(service, chosen, interval_s), service.keep_alive_s)


@router.get("/stats/table")
async def stats_table(
    http: HTTPRequest, request_id: str, replica: str | None = None, model: str | None = None
) -> dict[str, Any]:
    """The block tables of a running request, by branch and KV group; empty once it has ended.

    `replica` names its engine; by default the first ready one answers. Raises InvalidRequestError
    for an unknown replica, EngineDeadError.
    """
    check_query(http, ("request_id", "replica", "model"))
    engine = find_engine(http, replica, model)
    found = await engine.ask(Observe((), table_of=request_id), ENGINE_TIMEOUT_S)
    return {"request_id": request_id, "branches": found["table"]}


async def _events(
    service: Service, parts: tuple[str, ...], interval_s: float
) -> AsyncGenerator[bytes, None]:
    async with aclosing(service.feed.changes(service.engine, parts, interval_s)) as changes:
        async for engines in changes:
            yield event(_server(service) | {"engines": engines})
            if service.drain.is_on:
                return


def _parts(text: str) -> tuple[str, ...]:
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in PARTS:
            raise InvalidRequestError(
                f"parts has {name!r:.40}, but the parts are: {', '.join(PARTS)}", "parts"
            )
    return tuple(names)


def _interval_s(text: str) -> float:
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = 0.0
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise InvalidRequestError(
            f"interval is {text!r:.40}, but must be from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
            " seconds",
            "interval",
        )
    return interval_s


def _server(service: Service) -> dict[str, Any]:
    """The numbers of the API server and its tenants."""
    monitor = service.monitor
    finished: Counter[str] = Counter()
    for (reason, _), count in monitor.finished.items():
        finished[reason] += count
    num_open = service.tenants.num_open()
    return {
        "version": __version__,
        "model": service.model_name,
        "started_s": service.created_s,
        "state": service.engine.state.value,
        "is_draining": service.drain.is_on,
        "num_open_calls": monitor.num_open_http_calls,
        "num_open_generations": monitor.num_open_generations,
        "num_connections": service.connections.num_open,
        "num_listeners": service.feed.num_listeners,
        "finished": dict(finished),
        "time_to_first_token_s": monitor.time_to_first_token_s.as_dict(),
        "inter_token_s": monitor.inter_token_s.as_dict(),
        "end_to_end_s": monitor.end_to_end_s.as_dict(),
        "tenants": [
            {
                "name": name,
                "num_open": num_open.get(name, 0),
                "num_generations": counts.num_generations,
                "num_prompt_tokens": counts.num_prompt_tokens,
                "num_cached_tokens": counts.num_cached_tokens,
                "num_generated_tokens": counts.num_generated_tokens,
            }
            for name, counts in monitor.tenants.items()
        ],
    }
