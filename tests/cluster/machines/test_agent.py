"""A fleet whose engines are behind agents: real connections and processes, with fake engines."""

import asyncio
import os
import signal
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from tests.cluster.machines.cluster_keys import KEY, OTHER_KEY
from tests.cluster.test_fleet import generate, tokens, until
from tests.engine_client.engine_harness import Pulled, engines, own_processes, request
from tests.engine_client.fake_engine_process import COMMAND, SEGFAULT
from tests.engine_client.fleet_world import GivenSlots, LeastOpen, add_engine, costs

from quire.cluster.engine_slots import AgentSlots
from quire.cluster.machines import agent_main, remote_link
from quire.cluster.machines.agent import Agent
from quire.cluster.machines.cluster_key import tls_context
from quire.cluster.machines.remote_link import AgentAccess, RemoteLink
from quire.engine_client.engine_slot import EngineSlot
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.recovery import EngineState, RecoveryConfig
from quire.errors import EngineDeadError, RequestKillsEngineError

pytestmark = pytest.mark.usefixtures("forked_engines")

HEARTBEAT_S = 0.4
PATIENT = RecoveryConfig(max_restarts=1000, first_backoff_s=0.02, max_backoff_s=0.2)
SLOW = {"step_s": 0.01}


class Link:
    """A cable between the API server and an agent: forwards bytes, until it is cut."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.is_cut = False
        self._target = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += (writer, back)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.ensure_future(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            while self.is_cut:  # it vanishes: neither end is told
                await asyncio.sleep(0.01)
            sink.write(data)
        sink.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:  # a task that is cancelled closes nothing
            writer.transport.abort()


def new_fleet(*slots: EngineSlot) -> EngineFleet:
    given = GivenSlots(*slots)
    return EngineFleet({}, LeastOpen(), given, max_queued_requests=1000, recovery=PATIENT)


class Machines:
    """Agents, each behind a cable, and the fleet over them."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.links: list[Link] = []
        self.fleet = new_fleet()

    async def add(self, options: dict[str, object], key: bytes = KEY, server: str = "f") -> None:
        agent = Agent(KEY, COMMAND)
        link = Link(await agent.listen("127.0.0.1", 0))
        await link.start()
        self.agents.append(agent)
        self.links.append(link)
        await add_engine(self.fleet, self.slot(len(self.agents) - 1, options, key, server))

    def slot(self, number: int, options: Any, key: bytes = KEY, server: str = "f") -> EngineSlot:
        async def find() -> tuple[str, int]:
            return "127.0.0.1", self.links[number].port

        tls = tls_context(key, ssl.PROTOCOL_TLS_CLIENT)
        access = AgentAccess(find, tls, server, HEARTBEAT_S)
        return EngineSlot(f"r{number}", partial(RemoteLink, access=access), options)

    async def close(self) -> None:
        await self.fleet.shutdown(drain=False, timeout_s=1)
        for agent in self.agents:
            await agent.close()
        for link in self.links:
            link.close()


def with_machines(test: Callable[[Machines], Awaitable[Any]], *options: dict[str, object]) -> Any:
    async def run() -> Any:
        before = own_processes()
        machines = Machines()
        try:
            for each in options:
                await machines.add(each)
            return await test(machines)
        finally:
            await machines.close()
            assert own_processes() == before

    return asyncio.run(asyncio.wait_for(run(), 60))


async def longest_pause(streams: list[Any]) -> tuple[list[list[int]], float]:
    """The tokens of each stream, and the longest time between two of one."""

    async def read(stream: Any) -> tuple[list[int], float]:
        found: list[int] = []
        last_s, pause_s = time.monotonic(), 0.0
        async for output in stream:
            found += output.token_ids
            now_s = time.monotonic()
            last_s, pause_s = now_s, max(pause_s, now_s - last_s)
        return found, pause_s

    read_all = await asyncio.gather(*map(read, streams))
    return [found for found, _ in read_all], max(pause_s for _, pause_s in read_all)


def engine_pids() -> list[int]:
    return [child.pid for child in engines()]


def test_an_engine_that_is_killed_elsewhere_is_noticed_at_once() -> None:
    async def test(machines: Machines) -> None:
        fleet = machines.fleet
        streams = [generate(fleet, f"q{number}", max_tokens=100) for number in range(4)]
        reading = asyncio.ensure_future(longest_pause(streams))
        await asyncio.sleep(0.2)
        os.kill(engine_pids()[0], signal.SIGKILL)
        found, pause_s = await reading
        assert found == [list(range(11, 111))] * 4 and pause_s < 10
        await until(lambda: fleet.num_restarts == 1 and len(fleet.engines.ready) == 2)
        assert all(each.pid is None for each in fleet.engines_by_name.values())

    with_machines(test, SLOW, SLOW)


@pytest.mark.parametrize("token_s", [None, 0.003])
def test_a_step_elsewhere_may_take_as_long_as_the_longest_one_is_predicted_to(
    token_s: float | None,
) -> None:
    sizes = {"max_num_seqs": 1, "num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 1023}
    facts: dict[str, Any] = dict(sizes)
    if token_s is not None:
        facts["step_costs"] = costs(token_s)

    async def test(machines: Machines) -> None:
        link = machines.fleet.engines.all["r0"].supervisor.link
        assert link is not None and link._pulse is not None
        longest_s = link._pace.predicted_s
        assert longest_s == pytest.approx(1024 * (token_s or 0.0), rel=0.05)
        limit_s = 60.0 if token_s is None else 30.0 + 20.0 * longest_s
        session = machines.agents[0]._session
        assert session is not None
        await until(lambda: session.step_limit_s == limit_s)

    with_machines(test, {"facts": facts})


def test_streams_behind_a_cut_link_go_on_after_a_heartbeat() -> None:
    async def test(machines: Machines) -> None:
        fleet = machines.fleet
        streams = [generate(fleet, f"q{number}", max_tokens=150) for number in range(4)]
        reading = asyncio.ensure_future(longest_pause(streams))
        await asyncio.sleep(0.2)
        pids = engine_pids()
        machines.links[0].is_cut = True
        found, pause_s = await reading
        assert found == [list(range(11, 161))] * 4 and HEARTBEAT_S / 2 < pause_s < 10
        machines.links[0].is_cut = False
        await until(lambda: fleet.engines.all["r0"].state is EngineState.READY)
        assert engine_pids() == pids, "its engine waited with its weights"
        assert (await fleet.engines.all["r0"].stats())["num_running"] == 0, "and without requests"
        assert await tokens(generate(fleet, "new", max_tokens=3)) == [11, 12, 13]

    with_machines(test, SLOW, SLOW)


def test_a_request_that_kills_is_told_by_the_evidence_of_another_machine() -> None:
    async def test(machines: Machines) -> None:
        fleet = machines.fleet
        streams = [generate(fleet, f"q{number}", max_tokens=200) for number in range(3)]
        reading = asyncio.ensure_future(longest_pause(streams))
        killer = Pulled()
        killer.stream = fleet.generate([request("killer", SEGFAULT, 3, max_tokens=9)], killer)
        with pytest.raises(RequestKillsEngineError):
            await tokens(killer)
        assert (await reading)[0] == [list(range(11, 211))] * 3
        assert fleet.num_restarts == 2

    with_machines(test, SLOW, SLOW)


def test_an_agent_that_ends_is_a_machine_that_is_lost() -> None:
    async def test(machines: Machines) -> None:
        fleet = machines.fleet
        streams = [generate(fleet, f"q{number}", max_tokens=80) for number in range(4)]
        reading = asyncio.ensure_future(longest_pause(streams))
        await asyncio.sleep(0.1)
        await machines.agents[0].close()
        found, pause_s = await reading
        assert found == [list(range(11, 91))] * 4 and pause_s < 10
        assert fleet.engines.all["r0"].state is EngineState.RECOVERING
        again = Agent(KEY, COMMAND)
        machines.agents[0] = again
        machines.links[0]._target = await again.listen("127.0.0.1", 0)
        await until(lambda: fleet.engines.all["r0"].state is EngineState.READY)

    with_machines(test, SLOW, SLOW)


def test_peers_without_the_key_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def test(machines: Machines) -> None:
        with pytest.raises(OSError, match="does not have the cluster's key"):
            await machines.add(SLOW, key=OTHER_KEY)
        port = machines.links[0].port
        for first in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\2\x90\x00"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            if first:
                await asyncio.wait_for(reader.read(), 40)
            writer.close()
        assert await tokens(generate(machines.fleet, "q", max_tokens=3)) == [11, 12, 13]

    with_machines(test, SLOW)
    assert "it did not prove that it has the cluster's key" in caplog.text


def test_an_agent_serves_one_api_server_at_a_time() -> None:
    async def test(machines: Machines) -> None:
        with pytest.raises(OSError, match="serves another API server, f"):
            await new_fleet(machines.slot(0, SLOW, server="g")).start()
        other = new_fleet(machines.slot(0, SLOW, server="g"))
        await machines.fleet.shutdown(drain=False, timeout_s=1)
        await asyncio.sleep(0.1)
        await other.start()
        assert await tokens(generate(other, "q", max_tokens=3)) == [11, 12, 13]
        await other.shutdown(drain=False, timeout_s=1)

    with_machines(test, SLOW)


def test_an_engine_that_cant_be_built_says_why_from_there() -> None:
    async def test(machines: Machines) -> None:
        with pytest.raises(Exception, match="checkpoint"):
            await machines.add({"fail": "the checkpoint is broken"})
        with pytest.raises(EngineDeadError):
            await machines.add({"crash": True})

    with_machines(test, SLOW)


def test_finding_an_agent_may_take_longer_than_connecting_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_link, "CONNECT_TIMEOUT_S", 1.0)

    async def test(machines: Machines) -> None:
        port = machines.links[0].port

        async def find() -> tuple[str, int]:
            await asyncio.sleep(1.2)  # as long as Ray takes to start an actor
            return "127.0.0.1", port

        tls = tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)
        access = AgentAccess(find, tls, "f", HEARTBEAT_S)
        machines.fleet.engines.all["r0"].supervisor._new_link = partial(RemoteLink, access=access)
        await machines.fleet.engines.restart("r0")
        assert await tokens(generate(machines.fleet, "q", max_tokens=3)) == [11, 12, 13]

    with_machines(test, SLOW)


def test_an_agent_that_is_named_twice_is_refused_the_second_time() -> None:
    async def test(machines: Machines) -> None:
        port = machines.links[0].port
        await machines.fleet.shutdown(drain=False, timeout_s=1)
        names = [f"127.0.0.1:{port}", f"localhost:{port}"]
        given = AgentSlots(names, KEY, HEARTBEAT_S)
        fleet = EngineFleet({}, LeastOpen(), given, max_queued_requests=9, recovery=PATIENT)
        with pytest.raises(OSError, match=f"serves another API server, [0-9a-f]+/{names[0]}"):
            await fleet.start()

    with_machines(test, SLOW)


def test_a_stranger_can_not_forge_a_line_of_the_log() -> None:
    async def test() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"no\n2026-11-26 ERROR quire: forged" + b"x" * 999)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        given = AgentSlots([f"127.0.0.1:{port}"], KEY, HEARTBEAT_S)
        fleet = EngineFleet({}, LeastOpen(), given, max_queued_requests=9, recovery=PATIENT)
        with pytest.raises(OSError, match=r"does not speak TLS 1\.3") as caught:
            await fleet.start()
        assert "forged" not in str(caught.value) and "\n" not in str(caught.value)
        server.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--port", "99999"], "from 0 to 65535"),
        (["--port", "-1"], "from 0 to 65535"),
        (["--cpus", "0-1"], "processors that this process may use"),
        (["--cpus", "100000"], "processors that this process may use"),
    ],
)
def test_an_agents_arguments_are_checked_before_it_starts(given, says, capsys) -> None:
    with pytest.raises(SystemExit):
        agent_main.main([*given, "--key-file", "key"])
    assert says in capsys.readouterr().err
