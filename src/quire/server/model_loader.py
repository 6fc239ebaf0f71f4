"""Loads, unloads and ends the engines of one of a server's several models.

`launch` makes one loader for each entry of the file of models, `model_room` calls it. Imports no
torch.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.core.memory.memory_report import format_bytes
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.fleet_sleep import SleepMode
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL_NAME
from quire.observability.gpu_presence import lacks_gpu
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes, total_memory_bytes
from quire.observability.spans import Spans
from quire.options.engine_options import EngineOptions
from quire.server.adapter_names import read_modules
from quire.server.config import ServerConfig
from quire.server.fleet_launch import check_fleet
from quire.server.hosted_model import HostedModel
from quire.server.idle_unload import IdleUnload
from quire.server.listed_model import ListedModel
from quire.server.model_launch import ModelPlan, begin_grammars, make_plan, make_service
from quire.server.model_launch import start_engine as start_planned
from quire.server.model_room import ModelRoom
from quire.server.served_models import ServedModels
from quire.server.service import END_S, Service, SharedState
from quire.server.telemetry.monitor import Monitor
from quire.version import __version__

LEAST_KV_BYTES = 256 << 20
"""Memory for the KV cache of a model without any option for its memory: at least these bytes, and
at least a quarter of its weights."""

FREE_SHARE = 0.8
"""Share of the memory that is available at the start for all models, if models_memory is not
given."""

_ALONE = {
    "agents": "several models run on this machine alone",
    "ray_address": "several models run on this machine alone",
    "max_replicas": "engines of several models have a fixed number of replicas",
    "record": "a recording is of one model",
    "served_model_name": "each of several models has its own name",
}
"""Options that a server of several models refuses, with the reasons."""

_SIZES = ("kv_cache_memory", "num_blocks", "gpu_memory_utilization")

logger = get_logger(__name__)


class RoomIdleUnload(IdleUnload):
    """Unloads one of several models when it is idle, and obeys Ollama's `keep_alive` for it."""

    def __init__(
        self, fleet: EngineFleet, idle_s: float, room: ModelRoom, model: HostedModel
    ) -> None:
        super().__init__(fleet, idle_s)
        self._room = room
        self._model = model

    async def load(self) -> None:
        """See `IdleUnload`. Does nothing, since the call has entered the model."""

    def _listen(self) -> None:
        """Does nothing, since calls load the model before they use it."""

    @property
    def _is_busy(self) -> bool:
        return self._model.num_calls > 0

    @property
    def _last_use_s(self) -> float:
        return max(self._busy_s, self._model.last_use_s)

    async def _unload(self) -> None:
        self.keep(None)  # the operator's time ends with this stay of the model
        self._room.begin_unload(self._model)


class EngineLoader:
    """The `ModelLoader` of an entry. Belongs to one event loop."""

    def __init__(
        self,
        entry: ListedModel,
        server: ServerConfig,
        shared: SharedState,
        spans: Spans | None,
    ) -> None:
        """`server` has the options of the whole server. Call `attach` before the first load."""
        self._entry = entry
        names = {"served_model_name": entry.names}
        self._server = replace(server, **{**entry.server_options, **names})
        self._shared = shared
        #: Counts the model's generations over all its loads.
        self._monitor = Monitor(model_name=entry.names[0], spans=spans)
        self._plan: ModelPlan | None = None
        self._room: ModelRoom | None = None
        self._model: HostedModel | None = None
        self._watches: dict[EngineFleet, asyncio.Task[None]] = {}

    def attach(self, room: ModelRoom, model: HostedModel) -> None:
        """Tell the loader the room that calls it, and the model that it loads."""
        self._room, self._model = room, model

    async def prepare(self) -> int:
        """See `ModelLoader`."""
        self._plan, needed_bytes = await asyncio.to_thread(self._make_plan)
        return needed_bytes

    async def load(self, service: Service | None) -> Service:
        """See `ModelLoader`."""
        if service is not None:
            try:
                await service.engine.sleeping.wake()
            except Exception:  # after a bug, too, no process may be left
                await self.discard(service)
                raise
            return service
        plan = self._plan
        assert plan is not None, "`prepare` has made it"
        try:
            engine = await start_planned(plan, shows_progress=False)
        except BaseException:
            plan.files.grammars.close()
            raise
        try:
            begin_grammars(plan.files, engine.limits)
            service = make_service(plan, engine, replace(self._shared, monitor=self._monitor))
            service = replace(service, idle_unload=self._new_idle_unload(engine))
            await service.adapters.read_all(plan.lora_modules.read_first)
        except BaseException:
            plan.files.grammars.close()
            await engine.shutdown(drain=False, timeout_s=END_S)
            raise
        if service.idle_unload is not None:
            service.idle_unload.start()
        self._watches[engine] = asyncio.get_running_loop().create_task(self._watch(service))
        return service

    async def unload(self, service: Service, mode: SleepMode, wait_s: float) -> None:
        """See `ModelLoader`. The tokenizer and the template stay in the API server's memory."""
        keeps_process = self._server.models_keep_processes
        await service.engine.sleeping.sleep(mode, keeps_process=keeps_process, wait_s=wait_s)
        is_idle = self._model is not None and not self._model.num_calls
        if self._plan is not None and is_idle:
            await asyncio.to_thread(self._plan.files.grammars.close)

    async def discard(self, service: Service) -> None:
        """See `ModelLoader`."""
        if (watch := self._watches.pop(service.engine, None)) is not None:
            watch.cancel()
        if service.idle_unload is not None:
            await service.idle_unload.stop()
        if self._plan is not None:
            await asyncio.to_thread(self._plan.files.grammars.close)
        await service.engine.shutdown(drain=False, timeout_s=END_S)

    async def _watch(self, service: Service) -> None:
        """Report when the engines have failed for good."""
        error = await service.engine.wait_failed()
        assert self._room is not None and self._model is not None, "`attach` was called"
        self._room.on_failed(self._model, service, error)

    def _new_idle_unload(self, engine: EngineFleet) -> IdleUnload | None:
        """The task that unloads the idle model; None if it is pinned."""
        assert self._room is not None and self._model is not None, "`attach` was called"
        if self._entry.is_pinned:
            return None
        idle_s = self._server.idle_unload_s
        return RoomIdleUnload(
            engine, math.inf if idle_s is None else idle_s, self._room, self._model
        )

    def _make_plan(self) -> tuple[ModelPlan, int]:
        """The plan of the model, and the bytes that it takes. Raises ConfigurationError."""
        plan = make_plan(self._entry.engine_options, self._server)
        memory_bytes = self._entry.memory_bytes
        if memory_bytes is None:
            memory_bytes = _computed_bytes(plan) * self._server.replicas
        if all(getattr(plan.options, name) is None for name in _SIZES):
            if _may_use_gpu(plan.options):
                raise ConfigurationError(
                    "on a GPU, each of several models needs the size of its KV cache; give it"
                    " kv_cache_memory"
                )
            share = memory_bytes / self._server.replicas / total_memory_bytes()
            options = replace(plan.options, gpu_memory_utilization=min(1.0, share))
            plan = replace(plan, options=options)
        return plan, memory_bytes


@contextlib.asynccontextmanager
async def open_models(
    entries: Sequence[ListedModel], server: ServerConfig, spans: Spans | None, shared: SharedState
) -> AsyncIterator[ServedModels]:
    """The models of a server, none of which is in memory yet; their engines are ended at the end of
    `async with`."""
    budget_bytes = server.models_memory or int(available_memory_bytes() * FREE_SHARE)
    loaders = [EngineLoader(entry, server, shared, spans) for entry in entries]
    models = [
        HostedModel(entry.names, loader, entry.is_pinned, given_adapters(entry, server))
        for entry, loader in zip(entries, loaders, strict=True)
    ]
    room = ModelRoom(models, budget_bytes, server.models_wait_s, server.max_queued_requests)
    for loader, model in zip(loaders, models, strict=True):
        loader.attach(room, model)
    room.load_pinned()
    named = ", ".join(f"{each.name} (pinned)" if each.is_pinned else each.name for each in models)
    line = f"quire {__version__}: {len(models)} models within {format_bytes(budget_bytes)}: {named}"
    try:
        yield ServedModels(shared, models, room, [line])
    finally:
        await room.close()


def given_adapters(entry: ListedModel, server: ServerConfig) -> tuple[str, ...]:
    """Names of the adapters that the options give a model. Raises ConfigurationError."""
    modules = entry.server_options.get("lora_modules", server.lora_modules)
    return tuple(read_modules(modules, entry.names).paths)


def check_models(entries: Sequence[ListedModel], server: ServerConfig) -> None:
    """Raises ConfigurationError for models that can't be served together."""
    for name, why in _ALONE.items():
        if getattr(server, name) != getattr(ServerConfig(), name):
            raise ConfigurationError(f"{name} is set, but {why}; leave it out, or leave out models")
    taken: set[str] = set()
    for entry in entries:
        _check_entry(entry, server)
        names = {*entry.names, *given_adapters(entry, server)}
        if both := sorted(names & taken):
            raise ConfigurationError(
                f"two models, or their adapters, are called {both[0]!r}; give one of them another"
                " name"
            )
        taken |= names


def _check_entry(entry: ListedModel, server: ServerConfig) -> None:
    """Raises ConfigurationError for options of an entry that contradict each other."""
    options = EngineOptions.from_mapping(entry.engine_options)
    given = [name for name in _SIZES if getattr(options, name) is not None]
    is_on_gpu, name = _may_use_gpu(options), entry.names[0]
    if is_on_gpu and server.models_memory is None:
        raise ConfigurationError(
            f"the model {name!r} may use a GPU; give models_memory, the GPU's memory for all models"
        )
    if entry.memory_bytes is not None and given and not is_on_gpu:
        raise ConfigurationError(
            f"the model {name!r} has memory and {given[0]}, which both set the size of its KV"
            " cache; give one of them"
        )
    if entry.is_pinned and entry.server_options.get("idle_unload_s") is not None:
        raise ConfigurationError(
            f"the model {name!r} is pinned, so it is never unloaded; leave out idle-unload or"
            " pinned"
        )
    check_fleet(replace(server, **entry.server_options))


def _computed_bytes(plan: ModelPlan) -> int:
    """Bytes of weights, embeddings of images and KV cache that one engine will take. Raises
    ConfigurationError if the size of the weights is unknown, since they are not on this machine."""
    options = plan.options
    if options.gpu_memory_utilization is not None:
        return int(options.gpu_memory_utilization * total_memory_bytes())
    if not plan.files.model.has_weights:
        raise ConfigurationError(
            f"the weights of {options.model or EMBEDDED_MODEL_NAME} are not on this machine, so"
            " their size is unknown; fetch them with `quire pull`, or give the model memory"
        )
    folder = plan.files.model.folder
    weight_bytes = _num_weight_bytes(folder)
    image_bytes = 0
    if plan.files.images is not None and _may_encode(options):
        # The engine's slots hold a half of the cache's size beside it, unless images are very long.
        image_bytes = options.encoder_cache_bytes * 3 // 2
        # Imported here because it imports numpy, which a server for text never loads.
        from quire.hub.gguf.image_encoder import find_image_encoder

        encoder = find_image_encoder(folder, options.mmproj)
        image_bytes += 0 if encoder is None else _num_weight_bytes(encoder.path)
    kv_bytes = options.kv_cache_bytes
    if kv_bytes is None:
        kv_bytes = max(LEAST_KV_BYTES, weight_bytes // 4)
    return weight_bytes + image_bytes + kv_bytes


def _may_encode(options: EngineOptions) -> bool:
    """Whether the options allow an encoder of images; see `assembly.model_kind.why_text_only`."""
    return not options.language_model_only and options.model_impl != "transformers"


def _num_weight_bytes(path: Path) -> int:
    """Bytes of a model's files of weights. `path` is its folder, or its first GGUF file."""
    if path.is_dir():
        files = list(path.glob("*.safetensors"))
    else:
        stem, shard, _ = path.stem.partition("-00001-of-")
        files = list(path.parent.glob(f"{stem}-*-of-*.gguf")) if shard else [path]
    sizes = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


def _may_use_gpu(options: EngineOptions) -> bool:
    return options.device.startswith("cuda") or (options.device == "auto" and not lacks_gpu())
