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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO, cast

import pydantic.dataclasses  # noqa: F401 - pydantic would import it at the first /openapi.json
import uvicorn

from quire.core.sampling_params import ModelLimits
from quire.engine_client.early_checks import check_before_start, check_device, check_memory
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.process.grammar_compilers import GrammarCompilers
from quire.errors import ConfigurationError, QuireError, ServerDrainingError
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import EMBEDDED_MODEL_NAME, find_model, resolve_text_folder
from quire.observability import log
from quire.observability.spans import Spans, open_spans
from quire.options.engine_options import EngineOptions
from quire.server.adapter_names import AdapterNames, LoRAModules, read_modules
from quire.server.app import SECURITY_HEADERS, all_endpoints, create_app
from quire.server.batch.background import answering_batches
from quire.server.batch.batch_book import BatchBook, open_batches
from quire.server.config import ServerConfig
from quire.server.fleet_launch import check_fleet, start_engines
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.answer_store import AnswerStore
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.seeds import Seeds
from quire.server.http.body import UnknownFields
from quire.server.http.connection import ConnectionLimits, connection_class
from quire.server.http.guard import AccessConfig
from quire.server.http.host_rule import host_rule
from quire.server.http.listener import Listener, bind_failure, bound_socket
from quire.server.http.open_connections import OpenConnections
from quire.server.http.open_files import raise_open_files
from quire.server.idle_unload import idle_unload
from quire.server.limits import CallLimits
from quire.server.loading_progress import LoadingProgress
from quire.server.model_store import ModelStore
from quire.server.service import DRAIN_RETRY_AFTER_S, Service
from quire.server.shared_limits import body_budget, open_connections
from quire.server.signals import Stopper
from quire.server.start_message import SINGLE_API_SERVER, dialect_line, invitation, ledger
from quire.server.telemetry.load_recorder import make_recorder
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.keys import load_keys
from quire.server.tenants.tenants import TenantBook
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.model_dialect import ModelDialect, model_dialect
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import tokenizer_fields
from quire.version import __version__

IDLE_CONNECTION_S = 75
"""Seconds for which an idle connection stays open: longer than proxies usually reuse a connection,
since a proxy could otherwise send a call on a closed one."""

_ENGINE_SHUTDOWN_S = 5.0
_FLUSH_S = 3
"""Seconds for finished answers to reach their clients, after which the connections are closed."""

_DRAIN_POLL_S = 0.05

_TRIM_PERIOD_S = 10.0

INTERRUPTED = 130
"""The exit code that shells report for a program that Ctrl-C has ended."""

logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The options and files of one server, checked before the model is loaded."""

    #: Options of the engine. Their `model` is the folder in which the model was found, or names the
    #: embedded model.
    options: EngineOptions
    server: ServerConfig
    model_names: tuple[str, ...]
    #: Seed from which the seeds of requests without one are derived; None means random seeds.
    server_seed: int | None
    files: "_ModelFiles"
    access: AccessConfig
    limits: CallLimits
    tenants: TenantBook
    spans: Spans | None
    lora_modules: LoRAModules
    #: Clients' batches; None without a folder for them.
    batches: BatchBook | None


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """Contents of a model's folder that the API server needs."""

    model: FoundModel
    tokenizer: Tokenizer
    #: Grammar compilers for the tokenizer's vocabulary, used until the engine reports the model's
    #: vocabulary size. The function that starts the engine closes them.
    grammars: GrammarCompilers
    chat_template: ChatTemplate
    dialect: ModelDialect
    tokenizer_fields: Mapping[str, Any]


def serve(engine_options: Mapping[str, object], server: ServerConfig) -> int:
    """Serve a model until a signal ends it.

    Returns the exit code: 0, or 130 for a Ctrl-C while the model was loading. `engine_options` has
    the fields of `EngineOptions` by name. Raises ConfigurationError and its subclasses for options,
    models and ports that can't be used, EngineDeadError if the engine can't start, and the engine's
    own error once it has failed for good.
    """
    with bound_socket(server.host, server.port) as sock:
        num_files = raise_open_files()
        plan = make_plan(engine_options, server)
        return asyncio.run(_serve(plan, sock, open_connections(server, num_files)))


def make_plan(engine_options: Mapping[str, object], server: ServerConfig) -> ServerPlan:
    """Check all options and read the files that the API server needs. `engine_options` has the
    fields of `EngineOptions` by name. Raises ConfigurationError and its subclasses."""
    options = EngineOptions.from_mapping(engine_options)
    if options.skip_tokenizer_init:
        raise ConfigurationError(
            "skip_tokenizer_init is set, but the server needs the tokenizer to take and give text"
        )
    check_fleet(server)
    if not server.is_over_machines:
        check_device(options.device)
        check_memory(options)
    all_endpoints()  # imports them, which takes long, before the engine starts
    files = _load_files(options, server)
    name = files.model.name_for_clients(options.model or EMBEDDED_MODEL_NAME)
    names = server.served_model_name or (name,)
    if server.lora_modules and not options.enable_lora:
        raise ConfigurationError(
            "lora_modules names adapters, but they are not served; set enable_lora, or leave it out"
        )
    if options.model is not None and not server.is_over_machines:
        # Name the model so that the engine need not find or fetch it a second time.
        model, revision = files.model.named_for_others(options.model)
        options = replace(options, model=model, revision=revision)
    keys = load_keys(server.api_keys, server.api_key_file)
    return ServerPlan(
        options,
        server,
        names,
        options.seed if "seed" in engine_options else None,
        files,
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
        read_modules(server.lora_modules, names),
        open_batches(server),
    )


def _load_files(options: EngineOptions, server: ServerConfig) -> _ModelFiles:
    own = options.tokenizer is None
    model = find_model(options.model, options.revision, needs_tokenizer=own)
    check_before_start(options, model)
    text_folder = model.folder if own else resolve_text_folder(options.tokenizer)
    tokenizer = Tokenizer.from_folder(text_folder, remembers_words=False)
    if server.chat_template_file is None:
        template = ChatTemplate.from_folder(text_folder)
    else:
        template = ChatTemplate.from_option(server.chat_template_file, text_folder)
    fields = tokenizer_fields(text_folder)
    dialect = model_dialect(
        template, tokenizer, fields, server.tool_call_parser, server.reasoning_parser
    )
    grammars = GrammarCompilers(text_folder, tokenizer.vocab_size, dialect.dialect)
    return _ModelFiles(model, tokenizer, grammars, template, dialect, fields)


async def _serve(plan: ServerPlan, sock: socket.socket, connections: OpenConnections) -> int:
    grammars = contextlib.closing(plan.files.grammars)
    with grammars, Stopper() as stopper, contextlib.suppress(asyncio.CancelledError):
        await _load_and_serve(plan, sock, connections, stopper)
    if stopper.ended_loading is None:
        return 0
    _report(f"{stopper.ended_loading.name} while the model was loading; the server ends")
    return INTERRUPTED if stopper.ended_loading is signal.SIGINT else 0


async def start_engine(plan: ServerPlan) -> EngineFleet:
    """Start the engine and show the progress of loading the model on stderr. Raises
    EngineDeadError, or the error that kept the engine from being built."""
    plan.files.grammars.begin()
    log_line = logger.info if log.is_json() else None
    with contextlib.closing(LoadingProgress(sys.stderr, log_line=log_line)) as progress:
        return await start_engines(plan.options.as_mapping(), plan.server, progress)


async def _load_and_serve(
    plan: ServerPlan, sock: socket.socket, connections: OpenConnections, stopper: Stopper
) -> None:
    recorder = make_recorder(plan.server)
    monitor = Monitor(model_name=plan.model_names[0], spans=plan.spans, recorder=recorder)
    try:
        engine = await start_engine(plan)
    except BaseException:
        monitor.close()
        raise
    try:
        service = replace(make_service(plan, engine, monitor), connections=connections)
        if recorder is not None:
            recorder.begin(engine.limits, engine.facts)
        await service.adapters.read_all(plan.lora_modules.read_first)
        if service.idle_unload is not None:
            service.idle_unload.start()
        http = _HTTPServer(service, plan, sock)
        _stay_responsive()
        stopper.on_first = http.drain
        watch = asyncio.create_task(http.watch_engine())
        trim = asyncio.create_task(_return_memory())
        try:
            async with answering_batches(http.app, service, plan.access):
                await http.serve(sockets=[sock])
        finally:
            if service.idle_unload is not None:
                await service.idle_unload.stop()
            watch.cancel()
            trim.cancel()
        if http.failure is not None:
            raise http.failure
    finally:
        # uvicorn has already waited for the open answers, so nothing is left to drain.
        await engine.shutdown(drain=False, timeout_s=_ENGINE_SHUTDOWN_S)
        await asyncio.to_thread(monitor.close)


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


def _grammars(files: _ModelFiles, limits: ModelLimits) -> GrammarCompilers:
    """Start the grammar workers, so that the first grammar need not wait for the start. If the
    model generates no text, close the compilers instead."""
    compilers = files.grammars
    if limits.generates:
        compilers.limit_to(limits.vocab_size)
        compilers.finish()
    else:
        compilers.close()
    return compilers


def make_service(plan: ServerPlan, engine: EngineFleet, monitor: Monitor) -> Service:
    """Make the `Service` of the HTTP application for an engine that has started."""
    compilers = _grammars(plan.files, engine.limits)
    return Service(
        engine,
        plan.files.tokenizer,
        plan.files.chat_template,
        plan.model_names[0],
        Seeds(plan.server_seed),
        limits=plan.limits,
        tenants=plan.tenants,
        monitor=monitor,
        keep_alive_s=plan.server.keep_alive_s,
        default_deadline_s=plan.server.default_deadline_s,
        allow_special_tokens=plan.options.allow_special_tokens,
        tokenizer_fields=plan.files.tokenizer_fields,
        unknown_fields=cast(UnknownFields | None, plan.server.unknown_fields),
        system_fingerprint=_fingerprint(engine.facts),
        answers=AnswerStore(plan.server.response_store_bytes or 0),
        batches=plan.batches,
        idle_unload=idle_unload(engine, plan.server.idle_unload_s),
        model_store=ModelStore(lambda: _models_in_use(plan)) if plan.server.manage_models else None,
        grammars=GrammarChecks(compilers),
        dialect=plan.files.dialect.dialect,
        default_chat_template_kwargs=plan.server.default_chat_template_kwargs or {},
        other_names=plan.model_names[1:],
        adapters=AdapterNames(
            engine if plan.options.enable_lora else None, plan.lora_modules.paths, plan.model_names
        ),
        bodies=plan.access.bodies,
        metrics_names=plan.server.metrics_names,
        has_page=plan.server.page,
        answer_defaults=AnswerDefaults(
            includes_usage=plan.server.enable_force_include_usage,
            names_token_ids=plan.server.return_tokens_as_token_ids,
            hides_unused_tools=plan.server.exclude_tools_when_tool_choice_none,
        ),
    )


def _models_in_use(plan: ServerPlan) -> list[str]:
    """The models whose files the server needs, by name or path."""
    options = plan.options
    found = (options.model, options.tokenizer, options.speculative_model)
    return [str(plan.files.model.folder), *(name for name in found if name is not None)]


def _fingerprint(facts: Mapping[str, Any]) -> str:
    """OpenAI's `system_fingerprint`: names the settings of the server and engine that influence the
    answers."""
    known = (facts.get(key) for key in ("kernels", "dtype", "quantization"))
    return "-".join(["quire", __version__, *(str(fact) for fact in known if fact is not None)])


class _HTTPServer(uvicorn.Server):
    """uvicorn's server. It leaves signals to `Stopper` and prints the address once it serves.

    Invariant: before connections are closed, each open answer has finished or has got an error.
    """

    def __init__(self, service: Service, plan: ServerPlan, sock: socket.socket) -> None:
        #: The application that is served.
        self.app = create_app(service, plan.access)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=connection_class(ConnectionLimits(), service.connections),
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
        self._service = service
        self._plan = plan
        address, self._port = sock.getsockname()[:2]
        self._is_local = ipaddress.ip_address(address).is_loopback
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, name = self._plan.server.host, self._service.model_name
        is_guarded = self._plan.access.is_guarded
        await super().startup(sockets=[])  # uvicorn's own listeners accept without a bound
        make: Any = self.config.http_protocol_class
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        connect = functools.partial(make, config=self.config, **state)
        book = self._service.connections
        try:
            listeners: Any = [Listener(sock, connect, book) for sock in sockets or ()]
        except OSError as error:  # another server took the port while the model was loading
            raise ConfigurationError(bind_failure(host, self._port, error)) from error
        self.servers = listeners
        _say(ledger(name, self._service.engine.facts))
        if len(self._service.engine.engines_by_name) > 1:
            _say(SINGLE_API_SERVER)
        if self._service.chat_template.exists:
            found = self._plan.files.dialect
            _say(dialect_line(found.dialect.name, found.source, found.refusal))
        text = invitation(
            name,
            _url(host, self._port),
            has_chat=self._service.chat_template.exists,
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
        self._service.drain.begin()
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
            self._service.grammars.end(reason)
            await self._service.engine.shutdown(
                drain=False, timeout_s=_ENGINE_SHUTDOWN_S, reason=reason
            )
        self.should_exit = True

    @property
    def _num_open(self) -> int:
        """The number of open answers, including answers to calls that the engine has not received
        yet."""
        return len(self.server_state.tasks)

    async def watch_engine(self) -> None:
        """Stop serving when the engine has failed for good; its streams have received the error."""
        self.failure = await self._service.engine.wait_failed()
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
