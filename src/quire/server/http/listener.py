"""Accepts connections up to a limit and pauses while the limit is reached.

It replaces asyncio's server, which accepts a whole backlog in one turn of the event loop and, when
file descriptors run out, logs a line per connection. Connections that are not accepted wait in the
kernel's queue until others end. Called by `launch`; `open_connections` decides which connections
are admitted.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

from quire.errors import ConfigurationError, OverloadedError
from quire.observability.log import get_logger
from quire.server.http.connection import Connection, answer_to
from quire.server.http.open_connections import OpenConnections

BACKLOG = 2048
"""Number of connections that may wait to be accepted: enough for many clients that start at
once."""

ACCEPTED_AT_ONCE = 64
"""Maximum number of connections accepted in one turn of the event loop, so that open streams
continue between turns."""

PAUSE_S = 0.25
"""Maximum seconds of a pause while the limit is reached. When a connection ends, so does the
pause."""

FAILURE_PAUSE_S = 1.0
"""Seconds without accepting after the system had no descriptor or memory for a connection."""

LOG_INTERVAL_S = 60.0

_TOO_MANY = OverloadedError(
    "too many connections are open from this address; close some, or use them for more calls"
)

logger = get_logger(__name__)


class Listener:
    """The listening socket of a server, with the methods by which uvicorn closes asyncio's Server.

    Invariant: the event loop watches the socket unless accepting is paused or has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_connection: Callable[[], Connection],
        connections: OpenConnections,
    ) -> None:
        """Start accepting; needs a running event loop. Raises OSError if the address is in use.
        `make_connection` makes a new protocol for each connection."""
        self._sock = sock
        self._make_connection = make_connection
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._has_failed = False
        self._is_closed = False
        self._next_log_s = 0.0
        sock.setblocking(False)
        sock.listen(BACKLOG)
        connections.on_room = self._on_room
        self._loop.add_reader(sock, self._accept_some)

    def close(self) -> None:
        """Accept no more. The socket stays open, since its owner closes it."""
        self._is_closed = True
        self._connections.on_room = None
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has its protocol."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._connections.has_room():
                # Descriptors of closed connections are free in the next turn of the loop.
                if not self._connections.make_room():
                    self._stop_for(PAUSE_S)
                self._complain(
                    "%d connections are open, the maximum; idle connections are closed,"
                    " and new connections wait until others end"
                )
                return
            try:
                accepted, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._connections.make_room()
                self._has_failed = True
                self._stop_for(FAILURE_PAUSE_S)
                reason = error.strerror or str(error)
                self._complain("can't accept a connection beside %d others: %s", reason)
                return
            self._begin(accepted, address[0])

    def _begin(self, accepted: socket.socket, address: str) -> None:
        accepted.setblocking(False)
        connection = self._make_connection()
        if not self._connections.admit(connection, address):
            self._complain("beside %d connections no more of %s are accepted", address)
            with accepted:
                try:
                    accepted.send(answer_to(_TOO_MANY, []))
                except OSError:
                    return  # the client has gone
            return
        task = self._loop.create_task(self._connect(connection, accepted))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client has gone already
            accepted.close()
            self._connections.remove(connection)

    def _stop_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(seconds, self._resume_accepting)

    def _on_room(self) -> None:
        if self._pause is not None and not self._has_failed:
            self._resume_accepting()

    def _resume_accepting(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._pause, self._has_failed = None, False
        if not self._is_closed:
            self._loop.add_reader(self._sock, self._accept_some)

    def _complain(self, text: str, *details: str) -> None:
        """Log a warning, at most once a minute. `text` is a %-format for the number of open
        connections, followed by the details."""
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_INTERVAL_S
            logger.warning(text, self._connections.num_open, *details)


@contextlib.contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound to its port but does not listen yet. Raises ConfigurationError."""
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
            raise ConfigurationError(bind_failure(host, port, error)) from error
        yield sock


def bind_failure(host: str, port: int, error: OSError) -> str:
    """The message for an address that can't be listened on."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program; end that one, or choose another "
            "with --port (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be used without more rights; choose one above 1023 with --port"
    return f"can't listen on {host}, port {port}: {error.strerror}"
