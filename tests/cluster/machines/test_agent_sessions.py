"""An agent whose API servers come, go and misbehave; the test plays them, and engines are fake."""

import asyncio
import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.cluster.machines.cluster_keys import KEY
from tests.cluster.test_fleet import until
from tests.engine_client.engine_harness import engines, request
from tests.engine_client.fake_engine_process import COMMAND, HANG

from quire.cluster.machines import agent as agent_module
from quire.cluster.machines import channel as channel_module
from quire.cluster.machines.agent import Agent
from quire.cluster.machines.agent_messages import (
    EngineDied,
    OpenEngine,
    StepLimit,
    decode_from_agent,
)
from quire.cluster.machines.channel import AgentChannel, FrameKind, connect
from quire.cluster.machines.cluster_key import tls_context
from quire.engine_client.messages import (
    AddRequest,
    Outputs,
    Ping,
    Pong,
    Ready,
    Start,
    decode_to_server,
)
from quire.engine_client.process import process_link
from quire.ipc import encode

pytestmark = pytest.mark.usefixtures("forked_engines")

TLS = tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)


class ScriptedServer:
    """An API server that says what a test has it say, and keeps what it hears."""

    def __init__(self, port: int, server_id: str = "f") -> None:
        self.heard: list[Any] = []
        self.is_closed = False
        self._port = port
        self._server_id = server_id
        self.channel: AgentChannel | None = None

    async def connect(self) -> "ScriptedServer":
        self.channel = await connect("127.0.0.1", self._port, TLS, self._server_id, self)
        return self

    async def open(self, **options: object) -> "ScriptedServer":
        await self.connect()
        self.say_open(**options)
        return self

    def say_open(self, **options: object) -> None:
        self.say(OpenEngine(encode(Start(options))[4:], 60.0))

    def say(self, message: msgspec.Struct, kind: FrameKind = FrameKind.AGENT) -> None:
        assert self.channel is not None
        self.channel.send(kind, encode(message)[4:])

    def leave(self) -> None:
        assert self.channel is not None
        self.channel.abort()

    def on_frame(self, kind: FrameKind, body: bytes) -> None:
        decode = decode_to_server if kind is FrameKind.ENGINE else decode_from_agent
        self.heard.append(decode(body))

    def on_closed(self) -> None:
        self.is_closed = True

    def num_heard(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.heard)

    async def hears(self, kind: type) -> None:
        await until(lambda: self.num_heard(kind) > 0)


def with_agent(test: Callable[[Agent, int], Awaitable[Any]]) -> None:
    async def run() -> None:
        agent = Agent(KEY, COMMAND)
        try:
            await test(agent, await agent.listen("127.0.0.1", 0))
        finally:
            await agent.close()
            assert not engines(), "however it ends, no engine stays behind"

    asyncio.run(asyncio.wait_for(run(), 60))


async def busy_with_a_step_that_never_ends(port: int) -> ScriptedServer:
    server = await ScriptedServer(port).open()
    await server.hears(Ready)
    server.say(AddRequest(request("q", HANG, 1, max_tokens=9)), FrameKind.ENGINE)
    await server.hears(Outputs)
    return server


def test_engine_killed_by_an_earlier_request_restarts_for_the_next_server() -> None:
    async def test(agent: Agent, port: int) -> None:
        server = await busy_with_a_step_that_never_ends(port)
        server.leave()
        await until(lambda: agent._session is None)
        after = await ScriptedServer(port, "g").open()
        await asyncio.sleep(0.1)
        assert not after.num_heard(Ready), "the step of the earlier one has not ended"
        os.kill(engines()[0].pid, signal.SIGKILL)
        await after.hears(Ready)
        assert not after.num_heard(EngineDied) and not after.is_closed

    with_agent(test)


@pytest.mark.parametrize("says_how_long", [True, False])
def test_hanging_engine_is_killed_for_the_next_server(
    says_how_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not says_how_long:
        monkeypatch.setattr(agent_module, "UNKNOWN_STEP_LIMIT_S", 0.2)

    async def test(agent: Agent, port: int) -> None:
        server = await busy_with_a_step_that_never_ends(port)
        if says_how_long:
            server.say(StepLimit(0.2))
        server.leave()
        await until(lambda: agent._session is None)
        after = await ScriptedServer(port, "g").open()
        await after.hears(Ready)
        assert not after.num_heard(EngineDied) and not after.is_closed

    with_agent(test)


def test_oom_kills_are_counted_from_the_last_heartbeat_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not from the engine's start, which may be weeks ago."""
    kills = [3]
    monkeypatch.setattr(process_link, "num_oom_kills", lambda: kills[0])

    async def test(agent: Agent, port: int) -> None:
        server = await ScriptedServer(port).open()
        await server.hears(Ready)
        kills[0] = 4
        server.say(Ping(), FrameKind.ENGINE)
        await server.hears(Pong)
        os.kill(engines()[0].pid, signal.SIGKILL)
        await server.hears(EngineDied)
        (died,) = [each for each in server.heard if isinstance(each, EngineDied)]
        assert died.death.num_oom_kills == 0

    with_agent(test)


def test_server_that_kills_the_engine_while_it_waits_is_told_of_the_death() -> None:
    async def test(agent: Agent, port: int) -> None:
        server = await busy_with_a_step_that_never_ends(port)
        server.leave()
        await until(lambda: agent._session is None)
        after = await ScriptedServer(port, "g").open()
        after.say(agent_module.KillEngine("it was not ready in time"))
        await after.hears(EngineDied)

    with_agent(test)


def test_server_gets_no_message_before_it_has_opened_an_engine() -> None:
    async def test(agent: Agent, port: int) -> None:
        server = await ScriptedServer(port).open(step_s=0.01)
        await server.hears(Ready)
        server.say(AddRequest(request("q", 10, max_tokens=99)), FrameKind.ENGINE)
        await server.hears(Outputs)
        (process,) = engines()
        os.kill(process.pid, signal.SIGSTOP)
        server.leave()
        await until(lambda: agent._session is None)
        after = await ScriptedServer(port, "g").connect()
        engine = agent._engine
        assert engine is not None and not engine.takes_requests
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: engine.takes_requests)
        await asyncio.sleep(0.05)
        assert not after.heard
        after.say_open(step_s=0.01)
        await after.hears(Ready)
        await asyncio.sleep(0.05)
        assert after.num_heard(Ready) == 1

    with_agent(test)


def test_servers_that_come_and_go_quickly_leave_one_engine() -> None:
    async def test(agent: Agent, port: int) -> None:
        for number in range(4):
            server = await ScriptedServer(port).open(facts={"number": number})
            await asyncio.sleep(0.02 * number)
        await server.hears(Ready)
        assert [each.facts["number"] for each in server.heard if isinstance(each, Ready)] == [3]
        assert len(engines()) == 1

    with_agent(test)


def test_serving_engine_is_not_ended_as_one_without_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "KEEP_WARM_S", 0.5)

    async def test(agent: Agent, port: int) -> None:
        (await ScriptedServer(port).open()).leave()
        await until(lambda: agent._session is None and agent._engine is not None)
        (await ScriptedServer(port).connect()).leave()  # gone before it has opened anything
        await until(lambda: agent._session is None)
        server = await ScriptedServer(port).open()
        await server.hears(Ready)
        await asyncio.sleep(0.7)
        assert not server.is_closed and not server.num_heard(EngineDied)

    with_agent(test)


def test_server_that_opens_no_engine_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "GREETING_TIMEOUT_S", 0.3)

    async def test(agent: Agent, port: int) -> None:
        silent = await ScriptedServer(port, "silent").connect()
        with pytest.raises(OSError, match="serves another API server, silent"):
            await ScriptedServer(port, "g").connect()
        await until(lambda: silent.is_closed)
        await (await ScriptedServer(port, "g").open()).hears(Ready)

    with_agent(test)


def test_server_that_sends_invalid_messages_is_disconnected() -> None:
    async def test(agent: Agent, port: int) -> None:
        start = encode(Start({}))[4:]
        for messages in (
            [OpenEngine(start, 60.0), OpenEngine(start, 60.0)],
            [OpenEngine(b"nonsense", 60.0)],
            [OpenEngine(start, 60.0), StepLimit(float("nan"))],
            [OpenEngine(start, 0.0)],
            [OpenEngine(start, float("nan"))],
            [Start({})],
        ):
            server = await ScriptedServer(port).connect()
            for message in messages:
                server.say(message)
            await until(lambda server=server: server.is_closed)
        await (await ScriptedServer(port).open()).hears(Ready)

    with_agent(test)


def test_server_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNREAD_BYTES", 1 << 20)

    async def test(agent: Agent, port: int) -> None:
        server = await ScriptedServer(port).open()
        await server.hears(Ready)
        assert server.channel is not None and server.channel._transport is not None
        server.channel._transport.pause_reading()
        session = agent._session
        assert session is not None
        for _ in range(100):
            session.channel.send(FrameKind.AGENT, bytes(1 << 20))
        await until(lambda: agent._session is None)
        server.leave()

    with_agent(test)


def test_a_host_with_several_addresses_has_one_port() -> None:
    async def test(agent: Agent, port: int) -> None:
        other = Agent(KEY, COMMAND)
        assert await other.listen("localhost", 0)
        assert other._server is not None and len(other._server.sockets) == 1
        await other.close()

    with_agent(test)


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(agent: Agent, port: int) -> None:
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\0\0\0\1x")
            await writer.drain()
            writer.close()
        await until(lambda: agent._num_refused == 4)

    with_agent(test)
    assert caplog.text.count("a connection was refused") == 1


def test_many_strangers_at_once_are_not_kept_either(caplog: pytest.LogCaptureFixture) -> None:
    async def test(agent: Agent, port: int) -> None:
        num_strangers = agent_module.MAX_GREETINGS + 60
        calls = [asyncio.open_connection("127.0.0.1", port) for _ in range(num_strangers)]
        strangers = await asyncio.gather(*calls)
        await (await ScriptedServer(port).open()).hears(Ready)
        assert len(agent._greetings) <= agent_module.MAX_GREETINGS
        for _, writer in strangers:
            writer.close()

    with_agent(test)
    assert "Exception in callback" not in caplog.text


def test_bytes_that_a_stranger_adds_are_no_sign_of_life() -> None:
    """The start of a TLS record without an end, which nobody needs the key for."""

    async def test(agent: Agent, port: int) -> None:
        server = await ScriptedServer(port).connect()
        assert server.channel is not None and server.channel._transport is not None
        server.channel.beat(0.8)  # beats within the record below are part of it
        server.say(OpenEngine(encode(Start({}))[4:], 0.8))
        await server.hears(Ready)
        beneath = server.channel._transport._ssl_protocol._transport
        beneath.write(b"\x17\x03\x03\x40\x00")
        while not server.is_closed:
            beneath.write(b"x")
            await asyncio.sleep(0.02)

    with_agent(test)


def test_silent_strangers_do_not_keep_clients_out() -> None:
    async def test(agent: Agent, port: int) -> None:
        strangers = [
            await asyncio.open_connection("127.0.0.1", port)
            for _ in range(agent_module.MAX_GREETINGS + 20)
        ]
        await (await ScriptedServer(port).open()).hears(Ready)
        assert len(agent._greetings) <= agent_module.MAX_GREETINGS
        for _, writer in strangers:
            writer.close()

    with_agent(test)
