"""Starts and ends a server: one socket, one engine process, one event loop.

The port is bound before the model is loaded, so that an unusable port is reported at once. The
first Ctrl-C (or SIGTERM) lets open answers finish within a time limit while new calls are refused;
answers that are open after the limit end with an error. A second signal ends the server at once. No
process is left behind in any case. Imports no torch. Called by the command line.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401 - asyncio would import it for the first thread
import contextlib
import ctypes
import functools
import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO, TypeAlias, cast

import pydantic.dataclasses  # noqa: F401 - pydantic would import it at the first /openapi.json
import uvicorn

from quire.engine_client.process.early_process import EarlyProcess
from quire.errors import ConfigurationError, QuireError, ServerDrainingError
from quire.observability import log
from quire.observability.spans import Spans, open_spans
from quire.server.app import SECURITY_HEADERS, create_app
from quire.server.batch.background import answering_batches
from quire.server.batch.batch_book import BatchBook, open_batches
from quire.server.config import ServerConfig
from quire.server.generation.answer_store import AnswerStore
from quire.server.http.body import UnknownFields
from quire.server.http.connection import ConnectionLimits, connection_class
from quire.server.http.guard import AccessConfig
from quire.server.http.host_rule import host_rule
from quire.server.http.listener import Listener, bind_failure, bound_socket
from quire.server.http.open_connections import OpenConnections
from quire.server.http.open_files import raise_open_files
from quire.server.limits import CallLimits
from quire.server.listed_model import ListedModel
from quire.server.model_launch import (
    ModelPlan,
    begin_grammars,
    make_plan,
    make_service,
    start_engine,
    start_lines,
)
from quire.server.model_loader import check_models, open_models
from quire.server.model_store import ModelStore
from quire.server.served_models import ServedModels
from quire.server.service import DRAIN_RETRY_AFTER_S, END_S, SharedState
from quire.server.shared_limits import body_budget, open_connections
from quire.server.signals import Stopper
from quire.server.start_message import invitation
from quire.server.telemetry.load_recorder import make_recorder
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.keys import load_keys
from quire.server.tenants.tenants import TenantBook

IDLE_CONNECTION_S = 75
"""Seconds for which an idle connection stays open: longer than proxies usually reuse a connection,
since a proxy could otherwise send a call on a closed one."""

_FLUSH_S = 3
"""Seconds for finished answers to reach their clients, after which the connections are closed."""

_DRAIN_POLL_S = 0.05

_TRIM_PERIOD_S = 10.0

INTERRUPTED = 130
"""The exit code that shells report for a program that Ctrl-C has ended."""

logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The options of one server that hold for all its models, checked before any is loaded."""

    server: ServerConfig
    access: AccessConfig
    limits: CallLimits
    tenants: TenantBook
    spans: Spans | None
    #: Clients' batches; None without a folder for them.
    batches: BatchBook | None

    def shared_state(
        self,
        monitor: Monitor,
        connections: OpenConnections | None = None,
        in_use: Collection[str] = (),
    ) -> SharedState:
        """The state that the services of the models share. `in_use` are the models whose files the
        server needs, by name or path."""
        return SharedState(
            limits=self.limits,
            tenants=self.tenants,
            monitor=monitor,
            keep_alive_s=self.server.keep_alive_s,
            default_deadline_s=self.server.default_deadline_s,
            unknown_fields=cast(UnknownFields | None, self.server.unknown_fields),
            answers=AnswerStore(self.server.response_store_bytes or 0),
            batches=self.batches,
            metrics_names=self.server.metrics_names,
            has_page=self.server.page,
            model_store=ModelStore(lambda: in_use) if self.server.manage_models else None,
            connections=OpenConnections() if connections is None else connections,
            bodies=self.access.bodies,
        )


def serve(
    engine_options: Mapping[str, object],
    server: ServerConfig,
    entries: Sequence[ListedModel] | None = None,
    early: EarlyProcess | None = None,
) -> int:
    """Serve a model, or several, until a signal ends it.

    Returns the exit code: 0, or 130 for a Ctrl-C while the model was loading. `engine_options` has
    the fields of `EngineOptions` by name; with `entries`, which name several models, they are not
    read. `early` is the first process of the only model's engine; None if it has not started.
    Raises ConfigurationError and its subclasses for options, models and ports that can't be used,
    EngineDeadError if the engine can't start, and the engine's own error once it has failed for
    good.
    """
    with bound_socket(server.host, server.port) as sock:
        num_files = raise_open_files()
        if entries is not None:
            check_models(entries, server)
            plan = plan_server(server)
            opening = partial(open_models, entries, plan.server, plan.spans)
            num_replicas = sum(each.num_replicas(server) for each in entries)
            connections = open_connections(replace(server, replicas=num_replicas), num_files)
            in_use = [name for entry in entries for name in entry.files_in_use]
            return asyncio.run(_serve(plan, opening, sock, connections, in_use))
        model = make_plan(engine_options, server, early)
        plan = plan_server(server)
        with contextlib.closing(model.files.grammars):
            opening = partial(_open_model, model)
            connections, in_use = open_connections(server, num_files), model.files_in_use
            return asyncio.run(_serve(plan, opening, sock, connections, in_use))


def plan_server(server: ServerConfig) -> ServerPlan:
    """Check the options that don't depend on a model. Raises ConfigurationError."""
    keys = load_keys(server.api_keys, server.api_key_file)
    return ServerPlan(
        server,
        AccessConfig(
            keys=keys,
            allowed_origins=server.allowed_origins,
            hosts=host_rule(server.allowed_hosts, server.host, has_keys=keys is not None),
            max_body_bytes=server.max_body_bytes,
            bodies=body_budget(server),
        ),
        CallLimits(
            max_prompts=server.max_prompts,
            max_inputs=server.max_inputs,
            max_n=server.max_n,
            max_choices=server.max_choices,
            max_stop_strings=server.max_stop_strings,
            max_list_length=server.max_list_length,
        ),
        TenantBook(
            max_requests=server.max_tenant_requests,
            max_tokens_per_minute=server.max_tenant_tokens_per_minute,
        ),
        None if server.otlp_endpoint is None else open_spans(server.otlp_endpoint),
        open_batches(server),
    )


async def _serve(
    plan: ServerPlan,
    opening: "Opening",
    sock: socket.socket,
    connections: OpenConnections,
    in_use: Collection[str],
) -> int:
    monitor = Monitor(spans=plan.spans, recorder=make_recorder(plan.server))
    shared = plan.shared_state(monitor, connections, in_use)
    with Stopper() as stopper, contextlib.suppress(asyncio.CancelledError):
        await _load_and_serve(plan, opening, sock, shared, stopper)
    if stopper.ended_loading is None:
        return 0
    _report(f"{stopper.ended_loading.name} while the model was loading; the server ends")
    return INTERRUPTED if stopper.ended_loading is signal.SIGINT else 0


Opening: TypeAlias = Callable[[SharedState], AbstractAsyncContextManager[ServedModels]]
"""Opens the models of a server; they are ended at the end of `async with`."""


@contextlib.asynccontextmanager
async def _open_model(plan: ModelPlan, shared: SharedState) -> AsyncIterator[ServedModels]:
    """Load the only model of a server."""
    engine = await start_engine(plan)
    try:
        begin_grammars(plan.files, engine.limits)
        service = make_service(plan, engine, shared)
        if shared.monitor.recorder is not None:
            shared.monitor.recorder.begin(engine.limits, engine.facts)
        await service.adapters.read_all(plan.lora_modules.read_first)
        if service.idle_unload is not None:
            service.idle_unload.start()
        try:
            yield ServedModels.of(service, start_lines(plan, engine))
        finally:
            if service.idle_unload is not None:
                await service.idle_unload.stop()
    finally:
        # uvicorn has already waited for the open answers, so nothing is left to drain.
        await engine.shutdown(drain=False, timeout_s=END_S)


async def _load_and_serve(
    plan: ServerPlan,
    opening: "Opening",
    sock: socket.socket,
    shared: SharedState,
    stopper: Stopper,
) -> None:
    try:
        async with opening(shared) as models:
            shared.monitor.model_name = models.default.name
            http = _HTTPServer(models, plan, sock)
            _stay_responsive()
            stopper.on_first = http.drain
            watch = asyncio.create_task(http.watch_engine())
            trim = asyncio.create_task(_return_memory())
            try:
                async with answering_batches(http.app, models, plan.access):
                    await http.serve(sockets=[sock])
            finally:
                watch.cancel()
                trim.cancel()
            if http.failure is not None:
                raise http.failure
    finally:
        await asyncio.to_thread(shared.monitor.close)


def _stay_responsive() -> None:
    """Keep Python's garbage collector and thread switching from blocking the event loop for
    long."""
    # Objects that exist now live as long as the server, so the collector need not scan them.
    gc.collect()
    gc.freeze()
    # A tokenizing thread gives the lock back to the loop after this many seconds (default: 0.005).
    sys.setswitchinterval(0.001)


async def _return_memory() -> None:
    """Return free memory to the system at intervals. After long calls, the C library would keep
    hundreds of megabytes. The function of the C library runs in a thread without Python's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:  # only glibc has it; other C libraries return memory by themselves
        await asyncio.sleep(_TRIM_PERIOD_S)
        await asyncio.to_thread(trim, 0)


class _HTTPServer(uvicorn.Server):
    """uvicorn's server. It leaves signals to `Stopper` and prints the address once it serves.

    Invariant: before connections are closed, each open answer has finished or has got an error.
    """

    def __init__(self, models: ServedModels, plan: ServerPlan, sock: socket.socket) -> None:
        #: The application that is served.
        self.app = create_app(models, plan.access)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=connection_class(ConnectionLimits(), models.shared.connections),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                headers=SECURITY_HEADERS,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_FLUSH_S + 1,
            )
        )
        #: Error with which the engine has failed for good; None while it runs.
        self.failure: QuireError | None = None
        self._models = models
        self._plan = plan
        address, self._port = sock.getsockname()[:2]
        self._is_local = ipaddress.ip_address(address).is_loopback
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host = self._plan.server.host
        await super().startup(sockets=[])  # uvicorn's own listeners accept without a bound
        make: Any = self.config.http_protocol_class
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        connect = functools.partial(make, config=self.config, **state)
        book = self._models.shared.connections
        try:
            listeners: Any = [Listener(sock, connect, book) for sock in sockets or ()]
        except OSError as error:  # another server took the port while the model was loading
            raise ConfigurationError(bind_failure(host, self._port, error)) from error
        self.servers = listeners
        is_guarded = self._plan.access.is_guarded
        for line in self._models.start_lines:
            _say(line)
        text = invitation(
            self._models.default.name,
            _url(host, self._port),
            has_chat=self._models.has_chat,
            needs_key=is_guarded,
            is_exposed=not is_guarded and not self._is_local,
            has_operator=self._plan.access.has_operator,
        )
        _say(text)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(_FLUSH_S, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        """Abort all connections, so that each call's task ends as after a disconnect. uvicorn would
        cancel the tasks instead and print tracebacks."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def drain(self) -> None:
        """Refuse new calls, and stop serving once the open calls have ended."""
        self._models.shared.drain.begin()
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for open answers. The listener stays open meanwhile: new calls get 503 with
        Retry-After."""
        limit_s, num_open = self._plan.server.drain_timeout_s, self._num_open
        _report(_drain_text(num_open, limit_s))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._num_open and loop.time() < until_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._num_open:
            text = f"{self._num_open} answers were open after {limit_s} s; they end with an error"
            _report(text)
            reason = ServerDrainingError(
                "the server ended before the answer had; ask again", DRAIN_RETRY_AFTER_S
            )
            await self._models.end(reason)
        self.should_exit = True

    @property
    def _num_open(self) -> int:
        """The number of open answers, including answers to calls that the engine has not received
        yet."""
        return len(self.server_state.tasks)

    async def watch_engine(self) -> None:
        """Stop serving when the only model's engine has failed for good; its streams have received
        the error."""
        self.failure = await self._models.wait_failed()
        self.should_exit = True


def _drain_text(num_open: int, limit_s: float) -> str:
    if not num_open:
        return "draining: no answer is open; the server ends"
    answers = "1 answer is open and" if num_open == 1 else f"{num_open} answers are open and"
    return (
        f"draining: {answers} may go on for {limit_s:g} s; new calls are refused; a second Ctrl-C"
        " ends the server at once"
    )


def _report(text: str) -> None:
    """Write a line to stderr, as a JSON object if the log is in JSON."""
    if log.is_json():
        logger.info(text)
    else:
        _say(text, sys.stderr)


def _say(text: str, stream: TextIO | None = None) -> None:
    """Print to standard output or to `stream`. Errors such as a full disk or a closed pipe don't
    end the server."""
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # Otherwise flushing the buffer at exit would fail again and set the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _url(host: str, port: int) -> str:
    """The address at which a client on this machine reaches the server."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
