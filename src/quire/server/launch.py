"""Starts and ends a server: one socket, one engine process, one event loop.

The port is taken before the model is loaded, so that a wrong one is told at once. The first Ctrl-C
(or SIGTERM) lets open answers end, for a bounded time; a second one ends them. However this ends,
no process stays behind. Imports no torch. Called by the command line.
"""

import asyncio
import contextlib
import errno
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from quire.config import EngineOptions
from quire.engine.async_engine import DEFAULT_MAX_QUEUED_REQUESTS, AsyncEngine
from quire.errors import ConfigurationError
from quire.models.hub import resolve_model_folder
from quire.server.app import create_app
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

EMBEDDED_MODEL_NAME = "embedded"

_ENGINE_SHUTDOWN_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to serve, as what, and within which bounds.

    port: 0 takes any free one.
    served_model_name: None: the model as it was named, or "embedded".
    drain_timeout_s: how long open answers may go on after the first signal.
    max_queued_requests: open at once; beyond that the answer is 429.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    drain_timeout_s: int = 30
    max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"port is {self.port}, but must be from 0 (any) to 65535")
        for name in ("drain_timeout_s", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be at least 1")


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """What the front needs of a model's folder."""

    folder: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate


def serve(engine_options: Mapping[str, object], server: ServerConfig) -> int:
    """Serve a model until a signal ends it. Returns the exit code, 0.

    engine_options: by name, as `EngineOptions` has them. Raises ConfigurationError and its kinds
    for options, models and ports that can't be used, EngineDeadError if the engine can't start.
    """
    options = EngineOptions.from_mapping(engine_options)
    if options.skip_tokenizer_init:
        raise ConfigurationError(
            "skip_tokenizer_init is set, but the server needs the tokenizer to take and give text"
        )
    with _bound_socket(server.host, server.port) as sock:
        files = _load_files(options)
        process_options = dict(engine_options)
        if options.model is not None:  # the engine need not look it up, or fetch it, once more
            process_options |= {"model": str(files.folder), "revision": None}
        asyncio.run(_serve(process_options, options, server, files, sock))
    return 0


def _load_files(options: EngineOptions) -> _ModelFiles:
    folder = resolve_model_folder(options.model, options.revision)
    text_folder = folder
    if options.tokenizer is not None:
        text_folder = resolve_model_folder(options.tokenizer)
    tokenizer = Tokenizer.from_folder(text_folder)
    return _ModelFiles(folder, tokenizer, ChatTemplate.from_folder(text_folder))


async def _serve(
    process_options: Mapping[str, object],
    options: EngineOptions,
    server: ServerConfig,
    files: _ModelFiles,
    sock: socket.socket,
) -> None:
    with _Stopper() as stopper, contextlib.suppress(asyncio.CancelledError):
        engine = await AsyncEngine.start(
            process_options, max_queued_requests=server.max_queued_requests
        )
        try:
            service = Service(
                engine,
                files.tokenizer,
                files.chat_template,
                server.served_model_name or options.model or EMBEDDED_MODEL_NAME,
                random.Random(options.seed),
            )
            http = _HTTPServer(service, server, sock)
            stopper.on_first = http.stop
            await http.serve(sockets=[sock])
        finally:
            # Drained as far as it was to be: uvicorn has waited for the open answers.
            await engine.shutdown(drain=False, timeout_s=_ENGINE_SHUTDOWN_S)


class _Stopper:
    """What signals do: the first calls `on_first`; the second, or one before it is set, cancels."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        self._num_signals = 0

    def __enter__(self) -> "_Stopper":
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            self._num_signals += 1
            if self._num_signals == 1 and self.on_first is not None:
                self.on_first()
            else:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


class _HTTPServer(uvicorn.Server):
    """uvicorn, with signals left to `_Stopper` and the address told once it serves."""

    def __init__(self, service: Service, server: ServerConfig, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=server.drain_timeout_s,
            )
        )
        self._service = service
        self._host, self._port = server.host, sock.getsockname()[1]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server took the port while the model was loading
            raise ConfigurationError(_bind_failure(self._host, self._port, error)) from error
        print(_welcome(_url(self._host, self._port), self._service), flush=True)

    def stop(self) -> None:
        """Take no more connections and return once the open answers have ended."""
        self.should_exit = True
        num_open = self._service.engine.num_open
        if num_open:
            message = f"waiting for {num_open} open answers; once more ends them at once"
            print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens nowhere yet but has its port. Raises ConfigurationError."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigurationError(
            f"host is {host!r}, but that is no address of this machine: {error.strerror}"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise ConfigurationError(_bind_failure(host, port, error)) from error
        yield sock


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program; end that one, or choose another "
            "with --port (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be used without more rights; choose one above 1023 with --port"
    return f"can't listen on {host}, port {port}: {error.strerror}"


def _url(host: str, port: int) -> str:
    """Where a client on this machine finds the server."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _welcome(url: str, service: Service) -> str:
    name = service.model_name
    if service.chat_template.exists:
        path, wish = (
            "chat/completions",
            ('"messages": [{"role": "user", "content": "What does os.path.join do?"}]'),
        )
    else:
        path, wish = "completions", '"prompt": "Once upon a time"'
    return (
        f"quire serves {name} at {url} (Ctrl-C ends it). Try:\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", {wish}}}\''
    )
