"""GET /metrics: all counters in Prometheus's format, for the operator.

The API server's metrics are always present. While the engine does not answer, during a restart or a
step longer than SCRAPE_TIMEOUT_S, its metrics are left out; old values are not repeated.
`quire_engine_up` is 0 in a restart and 1 in a long step. Uses no global registry.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.engine_slot import ONLY_ENGINE
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.messages import GetMemory
from quire.engine_client.recovery import EngineState
from quire.errors import QuireError
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import models_of
from quire.server.service import Service
from quire.server.telemetry.fleet_metrics import by_label, fleet_families, model_families
from quire.server.telemetry.metric_families import (
    api_server_families,
    connection_families,
    engine_families,
    engine_state_families,
    generation_families,
    memory_families,
)
from quire.server.telemetry.vllm_metrics import as_vllm, cache_config, chosen

router = Endpoints(
    is_suggested=False,
    operator_paths=("/metrics",),
    probes=("/metrics",),
    responses=ERROR_RESPONSES,
)

SCRAPE_TIMEOUT_S = 2.0
"""Maximum seconds to wait for each of the engine's two replies. Prometheus's timeout is ten
seconds."""

STATES = tuple(state.value for state in EngineState)


class _Snapshot(Collector):
    """A Prometheus collector that returns metric families made beforehand."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@router.get("/metrics")
async def metrics(http: HTTPRequest) -> Response:
    """The metrics in the text format, or in OpenMetrics for clients that accept it.

    If there are several engines, the metrics of each have the label `replica`. If there are several
    models, the metrics of each have the label `model_name`.
    """
    models = models_of(http)
    shared = models.shared
    families = [
        *api_server_families(shared.monitor, shared.tenants.num_open()),
        *connection_families(shared.connections, shared.bodies.num_bytes),
    ]
    if models.room is None:
        families += generation_families(shared.monitor)
        families += await _model_families(models.default_service, families)
    else:
        families += model_families(models.all, models.room.budget_bytes)
        services = {service.model_name: service for service in models.services}
        found = await asyncio.gather(*map(_families_of_one, services.values()))
        families += by_label("model_name", dict(zip(services, found, strict=True)))
    registry = CollectorRegistry()
    registry.register(_Snapshot(chosen(families, shared.metrics_names)))
    ProcessCollector(namespace="quire_front", registry=registry)
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})


async def _families_of_one(service: Service) -> list[Metric]:
    """The metrics of one of several models."""
    families = list(generation_families(service.monitor))
    return families + await _model_families(service, families)


async def _model_families(service: Service, others: Iterable[Metric]) -> list[Metric]:
    """The metrics of a model's engines, and, under vLLM's names, the metrics in `others` that vLLM
    has, too."""
    engine = service.engine
    engines = dict(engine.engines_by_name)  # a copy, since replicas may be added or removed
    found = await asyncio.gather(*map(_engine_families, engines.values()))
    families = by_label("replica", dict(zip(engines, found, strict=True)))
    if ONLY_ENGINE not in engines:
        dispatcher = engine.dispatcher
        families += fleet_families(
            engine.engines.overview(), dispatcher.num_moved, dispatcher.num_blamed
        )
    name = service.model_name
    facts = {replica: each.facts for replica, each in engines.items()}
    return [*families, *as_vllm([*others, *families], name), cache_config(facts, name)]


async def _engine_families(engine: FleetEngine) -> list[Metric]:
    stats, memory = await _ask(engine)
    families = list(
        engine_state_families(
            engine.state.value, STATES, engine.num_restarts, engine.last_step_age_s
        )
    )
    if stats is not None:
        families += engine_families(stats)
    if stats is not None and memory is not None:
        families += memory_families(memory, stats.get("num_blocks"))
    process = ProcessCollector(
        namespace="quire_engine", pid=lambda: str(engine.pid), registry=CollectorRegistry()
    )
    return [*families, *process.collect()]


async def _ask(engine: FleetEngine) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The engine's stats and its memory report, as dicts by name. A reply that does not arrive in
    time is None."""
    stats = None
    try:
        stats = await engine.stats(SCRAPE_TIMEOUT_S)
        return stats, await engine.ask(GetMemory(), SCRAPE_TIMEOUT_S)
    except QuireError:  # the engine recovers, or a step takes long
        return stats, None
