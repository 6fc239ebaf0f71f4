"""Snapshots of the whole server, and streams of their changes, for GET /stats and /stats/events.

Each stream asks the engines itself, so no task runs while no stream is open. All streams share the
answers (`engine_view`). Belongs to one event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any, Protocol

from quire.engine_client.engine_slot import ONLY_ENGINE
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.recovery import EngineState
from quire.errors import OverloadedError
from quire.server.stats.engine_view import Cursor, EngineView

MAX_LISTENERS = 16
"""Number of streams that may be open at once."""

RETRY_AFTER_S = 5.0

FACTS = (
    "architecture",
    "num_parameters",
    "dtype",
    "quantization",
    "kernels",
    "device_name",
    "num_threads",
    "tensor_parallel_size",
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "weight_bytes",
    "kv_cache_bytes",
    "device_memory_bytes",
)
"""The engine's facts that a snapshot has."""

Cursors = dict[str, tuple[EngineView, Cursor]]
"""The cursors of one listener by engine, each with the view that it belongs to."""


class Watched(Protocol):
    """A model whose engines are shown: `HostedModel`, or a fake."""

    @property
    def name(self) -> str:
        """The model's name, unique on the server."""
        ...

    @property
    def fleet(self) -> EngineFleet | None:
        """The engines; None while the model is not in memory."""
        ...


class LiveFeed:
    """The views of the engines of all models, and the number of open streams. Loads no model."""

    def __init__(self) -> None:
        #: Number of open streams.
        self.num_listeners = 0
        #: Maps the name of each model to the views of its engines, by name.
        self._views: dict[str, dict[str, EngineView]] = {}

    async def refresh(self, model: Watched, parts: Collection[str]) -> None:
        """Ask all ready engines of a model for the parts that are due."""
        engines = dict(_engines(model))  # a copy, since replicas may be added or removed
        known = self._views.get(model.name, {})
        views = self._views[model.name] = {
            name: known.get(name) or EngineView() for name in engines
        }
        now_s = time.monotonic()
        await asyncio.gather(
            *[
                views[name].refresh(engine, parts, now_s)
                for name, engine in engines.items()
                if engine.state is EngineState.READY
            ]
        )

    async def snapshot(self, model: Watched, parts: Collection[str]) -> list[dict[str, Any]]:
        """The present views of a model's engines; empty while the model is not in memory."""
        return await self._look(model, {}, parts)

    async def changes(
        self, model: Watched, parts: Collection[str], interval_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """All engines of a model, first whole and then with what has changed, every interval_s
        seconds. There are none while the model is not in memory.

        Raises OverloadedError if too many streams are open.
        """
        if self.num_listeners >= MAX_LISTENERS:
            raise OverloadedError(
                f"{MAX_LISTENERS} streams of /stats/events are open; end one of them", RETRY_AFTER_S
            )
        self.num_listeners += 1
        cursors: Cursors = {}
        try:
            while True:
                yield await self._look(model, cursors, parts)
                await asyncio.sleep(interval_s)
        finally:
            self.num_listeners -= 1

    async def _look(
        self, model: Watched, cursors: Cursors, parts: Collection[str]
    ) -> list[dict[str, Any]]:
        await self.refresh(model, parts)
        fleet, views = model.fleet, self._views[model.name]
        if fleet is None:
            cursors.clear()  # the next engines are new to the listener
            return []
        for name in cursors.keys() - fleet.engines_by_name.keys():  # replicas that were removed
            del cursors[name]
        overview = {} if ONLY_ENGINE in fleet.engines_by_name else fleet.engines.overview()
        found = []
        for name, engine in fleet.engines_by_name.items():
            view = views.get(name) or EngineView()
            # A replica that was removed and added again has a new view, whose versions begin anew.
            known = cursors.get(name)
            is_new = known is None or known[0] is not view
            cursor = Cursor() if known is None or is_new else known[1]
            cursors[name] = view, cursor
            each: dict[str, Any] = {"name": name, "state": engine.state.value, "pid": engine.pid}
            each |= {"num_restarts": engine.num_restarts} | overview.get(name, {})
            if is_new:
                each["facts"] = _facts(engine)
            found.append(each | view.changes(cursor, parts))
        return found


def _engines(model: Watched) -> Mapping[str, FleetEngine]:
    return {} if model.fleet is None else model.fleet.engines_by_name


def _facts(engine: FleetEngine) -> dict[str, Any]:
    return {name: engine.facts[name] for name in FACTS if name in engine.facts}
