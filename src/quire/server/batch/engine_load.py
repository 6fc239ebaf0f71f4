"""The load of a server's engines, by which batches find rows that live calls leave free.

Called by `background`. For several models, the smallest number of rows and the largest number of
open generations count, so that batches leave rows free in each engine.
"""

from quire.engine_client.fleet import EngineFleet
from quire.engine_client.recovery import EngineState
from quire.errors import QuireError
from quire.server.hosted_model import Phase
from quire.server.served_models import ServedModels


class EngineLoad:
    """The load of the engines of all models in memory."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    @property
    def _engines(self) -> list[EngineFleet]:
        found = [each.service for each in self._models.all if each.phase is Phase.LOADED]
        return [service.engine for service in found if service is not None]

    @property
    def num_rows(self) -> int:
        """Sequences that an engine runs at once; 1 while no model is in memory."""
        rows = [int(engine.facts.get("max_num_seqs") or 1) for engine in self._engines]
        return min(rows, default=1)

    @property
    def num_open(self) -> int:
        """Open generations of the engine that has the most."""
        return max((engine.num_open for engine in self._engines), default=0)

    @property
    def takes_calls(self) -> bool:
        """Whether calls would be answered soon: the engine is ready, or calls wake it."""
        if self._models.room is not None:
            return True
        engine = self._models.default_service.engine
        is_woken = engine.sleeping.is_on and engine.sleeping.on_wanted is not None
        return engine.state is EngineState.READY or is_woken

    async def do_calls_wait(self, timeout_s: float) -> bool:
        """Whether calls wait in an engine. False for an engine that does not answer within
        `timeout_s`, because of a long step or a restart."""
        for engine in self._engines:
            try:
                if (await engine.stats(timeout_s))["num_waiting"]:
                    return True
            except QuireError:
                continue
        return False
