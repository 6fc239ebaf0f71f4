"""Agent of one replica: starts its engine and relays messages to and from the API server.

An API server connects, proves that it has the cluster's key, and sends the options of the engine.
When the engine dies, the agent reports its exit status and last activity. When the API server is
gone or can't be reached, the agent aborts the engine's requests, since the API server, if alive,
continues them in other engines. The engine keeps its weights loaded and waits for an API server. An
agent serves one API server at a time. It does not decode requests. Run by `agent_main`.
"""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from quire.cluster.machines.agent_messages import (
    VERSION,
    Beat,
    EngineDied,
    KillEngine,
    OpenEngine,
    Refused,
    StepLimit,
    Welcome,
    decode_to_agent,
)
from quire.cluster.machines.channel import AgentChannel, FrameKind, accept
from quire.cluster.machines.cluster_key import refusal, tls_context
from quire.cluster.machines.remote_link import with_engine_id
from quire.engine_client.messages import (
    AbortAll,
    Fatal,
    Outputs,
    Ping,
    Progress,
    Ready,
    RequestFailed,
    Start,
    decode_to_engine,
    decode_to_server,
)
from quire.engine_client.process.early_process import ENGINE_COMMAND
from quire.engine_client.process.process_link import ProcessLink
from quire.engine_client.recovery import UNKNOWN_STEP_LIMIT_S, Death
from quire.errors import QuireError
from quire.ipc import MessageError, encode
from quire.observability.log import get_logger

GREETING_TIMEOUT_S = 5.0
KEEP_WARM_S = 300.0
"""Seconds for which an engine without an API server is kept."""

MAX_GREETINGS = 64
"""Maximum number of connections that have not yet proved to have the key. A further connection
closes the oldest of these. So strangers who stay silent can't use up the file descriptors or keep
out an API server, which sends its proof at once."""

REFUSALS_EVERY_S = 5.0

_LENGTH_BYTES = 4

logger = get_logger(__name__)


class HostedEngine(ProcessLink):
    """An engine's process. Its messages are passed on undecoded, except the few that the agent
    reads."""

    def __init__(self, agent: "Agent", command: Sequence[str], start: bytes) -> None:
        """`start` is the body of the engine's `Start` message."""
        super().__init__(agent, agent, command)
        self.start = start
        self.engine_id = secrets.token_hex(8)
        self.ready: Ready | None = None
        self._agent = agent
        #: Number of pings that were sent and not yet answered.
        self._num_pings = 0
        self._is_flushing = False
        self._flush_limit: asyncio.TimerHandle | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether an API server may send requests: the engine is ready and has no requests of an
        earlier API server."""
        return self.ready is not None and not self._is_flushing

    def is_what(self, start: bytes) -> bool:
        """Whether `start` has the same options as this engine. The `max_model_len` in `start` may
        also be the length that the engine chose itself."""
        here, wanted = dict(_options(self.start)), dict(_options(start))
        if self.ready is not None and "max_model_len" in wanted:
            here["max_model_len"] = self.ready.limits.max_model_len
        return here == wanted

    def send_body(self, body: bytes) -> None:
        """Send the engine a message of the API server. `body` comes without its length prefix."""
        self._num_pings += _tag(body) == b"ping"
        self.send(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    def flush(self, step_limit_s: float) -> None:
        """End all requests and drop their remaining outputs. The engine is killed if its current
        step lasts longer than `step_limit_s` from now."""
        if self.ready is not None and not self._is_flushing:
            self._is_flushing = True
            why = f"its step had not ended {step_limit_s:g} s after its API server had gone"
            self._flush_limit = self._loop.call_later(step_limit_s, self.kill, why)
            self.send(encode(AbortAll()))
            self.send_body(encode(Ping())[_LENGTH_BYTES:])

    def data_received(self, data: bytes) -> None:
        self.last_heard_s = self._loop.time()
        try:
            for body in self._splitter.feed(data):
                self._take(body)
        except MessageError as error:
            self._fatal = Fatal(error.code, str(error))
            self.kill("it sent bytes that are no message")

    def _take(self, body: bytes) -> None:
        tag = _tag(body)
        if tag == b"pong":
            self._num_pings -= 1
            self.record_life()
            # After the answer to the last ping, no output of the former requests can follow.
            if self._is_flushing:
                if not self._num_pings:
                    self._is_flushing = False
                    if self._flush_limit is not None:
                        self._flush_limit.cancel()
                    self._agent.on_flushed(self)
                return
        elif tag == b"ready":
            ready = decode_to_server(body)
            assert isinstance(ready, Ready)
            self.ready = with_engine_id(ready, self.engine_id)
            body = encode(self.ready)[_LENGTH_BYTES:]
        elif tag == b"fatal":
            fatal = decode_to_server(body)
            assert isinstance(fatal, Fatal)
            self._fatal = fatal
        if not self._is_flushing:
            self._agent.on_body(self, body)


class AcceptedConnection(asyncio.Protocol):
    """A new TCP connection to an agent. Nothing is read from it before its TLS handshake."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._agent.on_connection(transport)


class Session:
    """The connection of one API server, and the `FrameHandler` of its channel."""

    def __init__(self, agent: "Agent", channel: AgentChannel, server_id: str) -> None:
        self.channel = channel
        self.server_id = server_id
        #: Body of the `Start` message for the engine that the API server wants; None until the API
        #: server has sent it.
        self.start: bytes | None = None
        #: Seconds that a step of the engine may still take when this connection has ended.
        self.step_limit_s = UNKNOWN_STEP_LIMIT_S
        #: Whether messages pass between the API server and the engine.
        self.is_served = False
        self._agent = agent

    def on_frame(self, kind: FrameKind, body: bytes) -> None:
        """See `FrameHandler`."""
        if kind is FrameKind.ENGINE:
            self._agent.on_server_body(self, body)
            return
        match decode_to_agent(body):
            case OpenEngine(start, heartbeat_s):
                if self.start is not None or not heartbeat_s > 0:
                    raise MessageError("an API server opens one engine, with a heartbeat above 0")
                _options(start)
                self.start = start
                self.channel.beat(heartbeat_s)
                self._agent.on_open(self)
            case KillEngine(why):
                self._agent.on_kill(self, why)
            case StepLimit(seconds):
                if not seconds > 0:
                    raise MessageError("the limit of a step must be above 0 s")
                self.step_limit_s = seconds
            case Beat():
                pass

    def on_closed(self) -> None:
        """See `FrameHandler`."""
        self._agent.on_session_end(self)


class Agent:
    """Runs one engine for one API server at a time. However the agent ends, no engine process stays
    behind.

    Invariant: the agent has at most one engine and one session. Messages pass between the engine
    and the session's API server only while the session `is_served`.
    """

    def __init__(self, key: bytes, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """`key` is the content of the cluster's key file. `command` starts the engine; see
        `ProcessLink`."""
        self._tls = tls_context(key, ssl.PROTOCOL_TLS_SERVER)
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._engine: HostedEngine | None = None
        self._opening: asyncio.Task[None] | None = None
        #: The timer that ends an engine without an API server.
        self._cooling: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        #: The greetings of connections that have not yet proved to hold the key, oldest first.
        self._greetings: dict[asyncio.Task[None], asyncio.Transport] = {}
        self._num_refused, self._next_refusal_s = 0, 0.0

    async def listen(self, host: str, port: int) -> int:
        """Accept connections and return the port; port 0 means any. Raises OSError."""
        if not port:  # a name may have several addresses, which would get different ports
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            host = str(found[0][4][0])
        self._server = await self._loop.create_server(lambda: AcceptedConnection(self), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all connections and the engine."""
        if self._server is not None:
            self._server.close()
        for greeting, transport in self._greetings.items():
            transport.abort()
            greeting.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._session is not None:
            self._session.channel.close()
        if self._cooling is not None:
            self._cooling.cancel()
        if self._engine is not None:
            await self._engine.close()

    # ---- API servers ------------------------------------------------------------------------

    def on_connection(self, transport: asyncio.Transport) -> None:
        """Greet a new connection. Above MAX_GREETINGS, the oldest unauthenticated one is closed."""
        if len(self._greetings) >= MAX_GREETINGS:
            oldest = next(iter(self._greetings))
            # Close the connection here, since its task may not have begun and could not close it.
            self._greetings.pop(oldest).abort()
            oldest.cancel()
        task = self._loop.create_task(self._greet(transport))
        self._greetings[task] = transport
        task.add_done_callback(lambda ended: self._greetings.pop(ended, None))

    async def _greet(self, transport: asyncio.Transport) -> None:
        # First, do the handshake. Close a connection whose other end does not have the key.
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                channel, greeting = await accept(transport, self._tls)
        except (QuireError, OSError) as error:  # TimeoutError is an OSError
            why = refusal(error) if isinstance(error, ssl.SSLError) else str(error)
            unproved = f"it did not prove that it has the cluster's key: {type(error).__name__}"
            self._note_refusal(why or unproved)
            return
        # Then refuse an API server if its version differs or if another API server is connected.
        present, why = self._session, ""
        if greeting.version != VERSION:
            why = f"the agent has version {VERSION} of the messages, not {greeting.version}"
        elif present is not None and present.server_id != greeting.server_id:
            why = f"the agent serves another API server, {present.server_id}"
        if why:
            self._note_refusal(why)
            channel.send_message(Refused(why))
            channel.close()
            return
        # Last, replace the present session, if any. It belongs to the same API server, and its
        # connection is dead.
        if present is not None:
            self.on_session_end(present)
            present.channel.abort()
        session = self._session = Session(self, channel, greeting.server_id)
        channel.send_message(Welcome())
        channel.start(session)
        logger.info("API server %s is connected", greeting.server_id)
        self._loop.call_later(GREETING_TIMEOUT_S, self._expect_open, session)

    def _note_refusal(self, why: str) -> None:
        """Log a refused connection, at most every REFUSALS_EVERY_S, so that strangers can't fill
        the disk."""
        self._num_refused += 1
        now_s = self._loop.time()
        if now_s >= self._next_refusal_s:
            self._next_refusal_s = now_s + REFUSALS_EVERY_S
            logger.warning(
                "a connection was refused: %s (refused since the last report: %d)",
                why,
                self._num_refused,
            )
            self._num_refused = 0

    def _expect_open(self, session: Session) -> None:
        """Disconnect an API server that has opened no engine. Heartbeats begin only when an engine
        is opened, so nothing else would notice its loss."""
        if session.start is None:
            session.channel.abort()

    def on_open(self, session: Session) -> None:
        """Connect the API server to the engine that it wants; start that engine if needed."""
        if session is not self._session or session.start is None:
            return
        if self._cooling is not None:
            self._cooling.cancel()
        engine = self._engine
        if engine is None or not engine.is_what(session.start):
            if self._opening is None or self._opening.done():
                self._opening = self._loop.create_task(self._replace())
        elif engine.ready is None or engine.takes_requests:
            self._serve(session, engine)
        # If the engine still has requests of an earlier API server, `on_flushed` serves it later.

    async def _replace(self) -> None:
        """End the former engine, then start the engine that the present API server wants. That API
        server may change meanwhile, so this loops. At most one engine process exists at a time."""
        while (session := self._session) is not None and session.start is not None:
            if self._engine is not None:
                if self._engine.is_what(session.start):
                    return
                await self._engine.close()
                continue
            engine = self._engine = HostedEngine(self, self._command, session.start)
            session.is_served = True
            try:
                await engine.open(len(engine.start).to_bytes(_LENGTH_BYTES, "big") + engine.start)
            except OSError as error:
                self._engine = None
                logger.error("the engine's process can't be started: %s", error)
                session.channel.close()
                return

    def _serve(self, session: Session, engine: HostedEngine) -> None:
        """Begin to pass messages between the API server and the engine, unless they pass
        already."""
        if session.is_served:
            return
        session.is_served = True
        if engine.ready is not None:
            session.channel.send(FrameKind.ENGINE, encode(engine.ready)[_LENGTH_BYTES:])

    def on_server_body(self, session: Session, body: bytes) -> None:
        """Pass a message of the API server to the engine."""
        if session is self._session and session.is_served and self._engine is not None:
            self._engine.send_body(body)

    def on_kill(self, session: Session, why: str) -> None:
        """Kill the engine, since the API server asks for that."""
        if session is self._session and self._engine is not None:
            session.is_served = True  # so that `on_death` reports to this API server
            self._engine.kill(why)

    def on_session_end(self, session: Session) -> None:
        """Abort all requests, since their API server is gone or can't be reached."""
        if session is not self._session:
            return
        logger.info("API server %s is gone", session.server_id)
        self._session = None
        if self._cooling is not None:
            self._cooling.cancel()
        if self._engine is not None:
            self._engine.flush(session.step_limit_s)
            self._cooling = self._loop.call_later(
                KEEP_WARM_S, self._engine.kill, f"no API server came for {KEEP_WARM_S:g} s"
            )

    # ---- the engine -------------------------------------------------------------------------

    def on_body(self, engine: HostedEngine, body: bytes) -> None:
        """Pass a message of the engine to the API server."""
        session = self._session
        if session is not None and session.is_served:
            session.channel.send(FrameKind.ENGINE, body)

    def on_flushed(self, engine: HostedEngine) -> None:
        """Serve the waiting API server, since the engine has no requests any more. An API server
        waits only after it has sent the options of its engine."""
        session = self._session
        if session is None or session.start is None or engine is not self._engine:
            return
        if engine.is_what(session.start):
            self._serve(session, engine)

    def on_death(self, link: Any, error: QuireError, death: Death) -> None:
        """See `LinkOwner`."""
        if link is not self._engine:
            return
        self._engine = None
        logger.error("%s", error)
        session = self._session
        if session is not None and session.is_served:
            session.is_served = False
            session.channel.send_message(EngineDied(death, error.code, str(error)))
            session.channel.close()
        elif session is not None:
            # The session was waiting for this engine, which died while it ended an earlier API
            # server's requests.
            self.on_open(session)

    def on_progress(self, link: Any, progress: Progress) -> None:
        """See `LinkOwner`. Never called, since messages are passed on undecoded."""

    def on_ready(self, link: Any, ready: Ready) -> None:
        """See `LinkOwner`. Never called, since `HostedEngine` passes the message on."""

    def on_message(self, link: Any, message: Outputs | RequestFailed) -> None:
        """See `OutputListener`. Never called, since messages are passed on undecoded."""


def _options(start: bytes) -> dict[str, Any]:
    """The options in the body of a `Start` message. Raises MessageError."""
    message = decode_to_engine(start)
    if not isinstance(message, Start):
        raise MessageError("an engine must be opened with its options")
    return message.options


def _tag(body: bytes) -> bytes:
    """The tag of a message of `engine_client.messages`, which is encoded as an array that begins
    with a short text. Returns b"" for other bodies."""
    if len(body) > 2 and body[0] & 0xF0 == 0x90 and body[1] & 0xE0 == 0xA0:
        return body[2 : 2 + (body[1] & 0x1F)]
    return b""
