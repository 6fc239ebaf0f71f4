"""GET /stats, /stats/events and /stats/table: what the server does now, for the operator only.

The page at `/` and `quire top` read them. Engines collect steps while one of them is asked, and
for some seconds after.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.messages import Observe
from quire.errors import InvalidRequestError
from quire.server.hosted_model import HostedModel
from quire.server.http.streaming import EventStream, event
from quire.server.routes.admin.health import ENGINE_TIMEOUT_S
from quire.server.routes.admin.memory import check_query, find_engine
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import ServedModels, find_model, models_of
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

    `parts` names the parts of each engine, separated by commas, and `model` one of several models;
    it has no engines while it is not in memory. Raises InvalidRequestError for an unknown part,
    UnknownModelError.
    """
    check_query(http, ("parts", "model"))
    models, shown = models_of(http), find_model(http, model)
    engines = await models.shared.feed.snapshot(shown, _parts(parts))
    return _server(models, shown) | {"engines": engines}


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
    models, shown = models_of(http), find_model(http, model)
    changes = models.shared.feed.changes(shown, _parts(parts), _interval_s(interval))
    return EventStream(_events(models, shown, changes), models.shared.keep_alive_s)


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
    models: ServedModels, shown: HostedModel, changes: AsyncGenerator[list[dict[str, Any]], None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(changes):
        async for engines in changes:
            yield event(_server(models, shown) | {"engines": engines})
            if models.shared.drain.is_on:
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


def _models(models: ServedModels) -> list[dict[str, Any]]:
    """The models of a server that has several, whether they are in memory or not."""
    if models.room is None:
        return []
    now_s = asyncio.get_running_loop().time()
    return [
        {
            "name": each.name,
            **each.report(),
            "needed_bytes": each.needed_bytes,
            "is_pinned": each.is_pinned,
            "num_loads": each.num_loads,
            "unused_s": now_s - each.last_use_s if each.last_use_s else None,
        }
        for each in models.all
    ]


def _server(models: ServedModels, shown: HostedModel) -> dict[str, Any]:
    """The numbers of the API server, its models and its tenants."""
    shared, room = models.shared, models.room
    # Generations are counted by model, calls for the whole server.
    monitor = shared.monitor if shown.service is None else shown.service.monitor
    finished: Counter[str] = Counter()
    for (reason, _), count in monitor.finished.items():
        finished[reason] += count
    num_open = shared.tenants.num_open()
    return {
        "version": __version__,
        "model": shown.name,
        "models": _models(models),
        "models_memory_bytes": None if room is None else room.budget_bytes,
        "started_s": shown.created_s,
        "state": shown.state if shown.fleet is None else shown.fleet.state.value,
        "is_draining": shared.drain.is_on,
        "num_open_calls": shared.monitor.num_open_http_calls,
        "num_open_generations": monitor.num_open_generations,
        "num_connections": shared.connections.num_open,
        "num_listeners": shared.feed.num_listeners,
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
