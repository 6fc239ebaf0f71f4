"""Loads and unloads models in tasks, and records how that went.

`model_room` decides which models. Imports no torch.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quire.core.memory.memory_report import format_bytes
from quire.engine_client.fleet_sleep import WAIT_S, SleepMode
from quire.engine_client.recovery import EngineState
from quire.errors import QuireError
from quire.observability.log import get_logger
from quire.server.hosted_model import HostedModel, ModelLoader, Phase
from quire.server.service import Service

logger = get_logger(__name__)


class ModelMoves:
    """The loads and unloads under way. Belongs to one event loop."""

    def __init__(
        self, on_loaded: Callable[[HostedModel], None], on_change: Callable[[], None]
    ) -> None:
        """`on_loaded` is called when a model has been loaded, `on_change` when one has been
        unloaded, or could not be loaded."""
        self._on_loaded = on_loaded
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._preparing: dict[HostedModel, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: The end of each model's last unload.
        self._unloaded: dict[HostedModel, asyncio.Event] = {}

    async def close(self) -> None:
        """End all loads and unloads that are under way."""
        tasks = [*self._tasks, *self._preparing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(self, model: HostedModel) -> None:
        """Find out how much memory the model takes. Raises ModelLoadError."""
        task = self._preparing.get(model)
        if task is None:
            task = self._preparing[model] = self._loop.create_task(self._read_size(model))
        await asyncio.shield(task)  # other calls wait for it, too
        if model.needed_bytes is None:
            assert model.failure is not None, "`_read_size` has recorded it"
            raise model.load_error(model.failure.backoff_s)

    async def _read_size(self, model: HostedModel) -> None:
        try:
            model.needed_bytes = await _loader_of(model).prepare()
        except Exception as error:  # a bug, too, fails only this model
            self.fail(model, _as_load_failure(error))
        finally:
            del self._preparing[model]

    def begin_load(self, model: HostedModel, needed_bytes: int) -> None:
        """Begin to load a model, for which `needed_bytes` are reserved."""
        model.phase, model.reserved_bytes = Phase.LOADING, needed_bytes
        self.spawn(self._load(model))

    async def _load(self, model: HostedModel) -> None:
        began_s = self._loop.time()
        try:
            model.service = service = await _loader_of(model).load(model.service)
        except Exception as error:  # a bug, too, fails only this model
            model.service, model.needed_bytes = None, None
            model.phase, model.reserved_bytes = Phase.UNLOADED, 0
            self.fail(model, _as_load_failure(error))
        else:
            model.phase, model.failure = Phase.LOADED, None
            model.num_loads += 1
            model.loaded_at_s = model.last_use_s = self._loop.time()
            model.load_s = model.loaded_at_s - began_s
            self._correct_size(model, service)
            logger.info("loaded %s in %.1f s", model.name, model.load_s)
            self._on_loaded(model)
            return
        self._on_change()

    def _correct_size(self, model: HostedModel, service: Service) -> None:
        """Reserve what the loaded model takes instead of what was expected."""
        taken = memory_taken(service)
        if taken > model.reserved_bytes:
            logger.warning(
                "%s takes %s, more than the %s that were reserved for it",
                model.name,
                format_bytes(taken),
                format_bytes(model.reserved_bytes),
            )
        if taken:
            model.needed_bytes = model.reserved_bytes = taken

    def begin_unload(self, model: HostedModel) -> None:
        """Begin to unload a model that is in memory and has no calls."""
        self._mark_unloading(model)
        self.spawn(self._unload(model))

    async def unload(self, model: HostedModel, mode: SleepMode, wait_s: float = WAIT_S) -> None:
        """Unload a model that is in memory. Raises QuireError if that fails and it has calls."""
        self._mark_unloading(model)
        try:
            await self._make_unloaded(model, mode, wait_s)
        finally:
            self._unloaded[model].set()

    async def wait_unloaded(self, model: HostedModel) -> None:
        """Wait until an unload under way has ended."""
        if (ended := self._unloaded.get(model)) is not None:
            await ended.wait()

    def _mark_unloading(self, model: HostedModel) -> None:
        if model.phase is not Phase.UNLOADING:
            model.phase, self._unloaded[model] = Phase.UNLOADING, asyncio.Event()

    async def _make_unloaded(self, model: HostedModel, mode: SleepMode, wait_s: float) -> None:
        service = model.service
        assert service is not None, "it is loaded"
        try:
            await _loader_of(model).unload(service, mode, wait_s)
        except Exception as error:  # a bug, too, leaves the memory to other models
            is_usable = (
                isinstance(error, QuireError) and service.engine.state is not EngineState.FAILED
            )
            if model.num_calls and is_usable:
                model.phase = Phase.LOADED
                raise
            # An engine that is being restarted can't sleep, so it is ended for good.
            logger.warning("%s is ended, since it can't be unloaded: %s", model.name, error)
            await self._end(model, service)
        model.phase, model.reserved_bytes = Phase.UNLOADED, 0
        model.num_unloads += 1
        logger.info("unloaded %s", model.name)

    async def _unload(self, model: HostedModel) -> None:
        await self.unload(model, "keep")
        self._on_change()

    def begin_discard(self, model: HostedModel, service: Service, error: QuireError) -> None:
        """Begin to end a model's engines, which have failed with `error`."""
        self._mark_unloading(model)
        self.spawn(self._discard(model, service, error))

    async def _discard(self, model: HostedModel, service: Service, error: QuireError) -> None:
        try:
            await self._end(model, service)
        finally:
            self._unloaded[model].set()
        model.phase, model.reserved_bytes = Phase.UNLOADED, 0
        self.fail(model, error)
        self._on_change()

    async def _end(self, model: HostedModel, service: Service) -> None:
        """End a model's engines for good."""
        try:
            await _loader_of(model).discard(service)
        except Exception as error:  # otherwise the model's memory would stay reserved for good
            logger.error("ending the engines of %s has met a bug", model.name, exc_info=error)
        model.service = None

    def fail(self, model: HostedModel, error: QuireError) -> None:
        """Record that the model can't be loaded, and refuse the calls that wait for it."""
        model.note_failure(error, self._loop.time())
        failure = model.failure
        assert failure is not None, "it was just recorded"
        logger.error(
            "the model %s could not be loaded, and is not tried again for %g s: %s",
            model.name,
            failure.backoff_s,
            error,
        )
        model.refuse_waiting(lambda: model.load_error(failure.backoff_s))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task that `close` ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("loading or unloading a model has met a bug", exc_info=error)


def memory_taken(service: Service) -> int:
    """Bytes of the engines' weights, images, adapters, largest step and KV cache; 0 if they report
    none."""
    facts = [engine.facts for engine in service.engine.engines_by_name.values()]
    return sum(int(each.get(f"{name}_bytes") or 0) for each in facts for name in _PARTS)


_PARTS = (
    *("weight", "vision_weight", "encoder_cache", "adapter", "activation", "graph"),
    "kv_cache",
)
"""The parts of an engine's memory that count; see `engine_client.device_ledger`."""


def _loader_of(model: HostedModel) -> ModelLoader:
    assert model.loader is not None, "a model in a room has one"
    return model.loader


def _as_load_failure(error: BaseException) -> QuireError:
    """The error to report for a load that failed: a QuireError itself, or the type of a bug."""
    if isinstance(error, QuireError):
        return error
    logger.error("loading a model has met a bug", exc_info=error)
    return QuireError(f"the server failed ({type(error).__name__}); its log says more")
