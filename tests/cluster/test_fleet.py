"""A fleet of real processes, with a fake engine inside each."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest
from tests.engine_client.engine_harness import Pulled, engines, own_processes, request
from tests.engine_client.fake_engine_process import COMMAND
from tests.engine_client.fleet_world import GivenSlots, LeastOpen, add_engine, costs

from quire.cluster import silence_watch, slowness_poller
from quire.engine_client.engine_slot import EngineSlot
from quire.engine_client.failover.connected_replicas import ConnectedReplica
from quire.engine_client.fleet import EngineFleet, _summed
from quire.engine_client.messages import GetStats
from quire.engine_client.process.process_link import ProcessLink
from quire.engine_client.process.supervisor import Supervisor
from quire.engine_client.recovery import EngineState, RecoveryConfig
from quire.errors import AdapterError, ConfigurationError, EngineDeadError, ReplicaDiffersError

pytestmark = pytest.mark.usefixtures("forked_engines")

QUICK = RecoveryConfig(first_backoff_s=0.01, heartbeat_timeout_s=20.0)


def slots(*options: Mapping[str, object]) -> list[EngineSlot]:
    open_link = partial(ProcessLink, command=COMMAND)
    return [EngineSlot(f"r{number}", open_link, each) for number, each in enumerate(options)]


def with_fleet(
    test: Callable[[EngineFleet], Awaitable[Any]],
    *options: Mapping[str, object],
    recovery: RecoveryConfig = QUICK,
) -> Any:
    async def run() -> Any:
        before = own_processes()
        given = GivenSlots(*slots(*options))
        fleet = EngineFleet({}, LeastOpen(), given, max_queued_requests=1000, recovery=recovery)
        placement = fleet.dispatcher.placement
        fleet.watches = [
            slowness_poller.SlownessPoller(fleet.engines, placement),
            silence_watch.SilenceWatch(fleet.engines, fleet.dispatcher),
        ]
        try:
            await fleet.start()
            return await test(fleet)
        finally:
            await fleet.shutdown(drain=False, timeout_s=1)
            assert own_processes() == before

    return asyncio.run(asyncio.wait_for(run(), 60))


def generate(fleet: EngineFleet, name: str, **more: Any) -> Pulled:
    pulled = Pulled()
    pulled.stream = fleet.generate([request(name, **more)], pulled)
    return pulled


async def tokens(pulled: Pulled) -> list[int]:
    return [token for output in [each async for each in pulled] for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


SLOW = {"step_s": 0.01}
SLOWER = {"step_s": 0.03}
"""Its streams of COUNT last more than a second, longer than a busy machine stops this process."""
COUNT = list(range(11, 51))


def test_streams_go_on_when_a_replica_is_killed_and_it_comes_back() -> None:
    async def test(fleet: EngineFleet) -> None:
        assert fleet.state is EngineState.READY and list(fleet.engines_by_name) == ["r0", "r1"]
        streams = [generate(fleet, f"q{number}", max_tokens=40) for number in range(6)]
        reading = [asyncio.ensure_future(tokens(stream)) for stream in streams]
        await asyncio.sleep(0.1)
        victim = fleet.engines.all["r0"]
        assert fleet.dispatcher.replicas.get("r0").num_branches == 3 and victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: victim.state is EngineState.RECOVERING)
        assert fleet.state is EngineState.READY, "the other one takes requests"
        assert await asyncio.gather(*reading) == [COUNT] * 6
        await until(lambda: victim.state is EngineState.READY)
        assert fleet.num_restarts == 1 and fleet.num_open == 0

    with_fleet(test, SLOWER, SLOWER)


def test_an_engine_that_dies_while_all_fall_asleep_does_not_keep_the_others_asleep() -> None:
    async def test(fleet: EngineFleet) -> None:
        victim, other = fleet.engines.all.values()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)  # so that the next death is followed by a pause
        await until(lambda: victim.num_restarts == 1 and victim.state is EngineState.READY)
        streams = [generate(fleet, f"q{number}", max_tokens=40) for number in range(2)]
        reading = [asyncio.ensure_future(tokens(stream)) for stream in streams]
        await asyncio.sleep(0.1)
        falling = asyncio.ensure_future(fleet.sleeping.sleep("wait", keeps_process=False))
        await asyncio.sleep(0)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="can't be put to sleep"):
            await falling
        assert other.state is EngineState.ASLEEP
        assert await asyncio.gather(*reading) == [COUNT] * 2
        assert victim.state is EngineState.READY
        await fleet.sleeping.sleep("keep", keeps_process=False)  # the rest
        assert fleet.state is EngineState.ASLEEP
        await fleet.sleeping.wake()
        assert len(fleet.engines.ready) == 2
        await other.supervisor.sleep(keeps_process=False)
        await fleet.sleeping.wake()
        assert len(fleet.engines.ready) == 2

    with_fleet(test, SLOWER, SLOWER, recovery=RecoveryConfig(first_backoff_s=1.5))


def test_engines_take_requests_again_if_they_do_not_fall_asleep() -> None:
    async def test(fleet: EngineFleet) -> None:
        reading = asyncio.ensure_future(tokens(generate(fleet, "q", max_tokens=40)))
        falling = asyncio.ensure_future(fleet.sleeping.sleep("wait", keeps_process=False))
        await asyncio.sleep(0.05)
        falling.cancel()
        assert await tokens(generate(fleet, "r", max_tokens=3)) == [11, 12, 13]
        assert await reading == COUNT

    with_fleet(test, SLOWER)


def test_a_replica_that_computes_something_else_is_refused() -> None:
    async def test(fleet: EngineFleet) -> None:
        with pytest.raises(ReplicaDiffersError, match="differs from the first one in fingerprint"):
            await add_engine(fleet, slots(SLOW, {**SLOW, "facts": {"fingerprint": "other"}})[1])
        assert list(fleet.engines.all) == ["r0"]
        with pytest.raises(ReplicaDiffersError, match="other limits"):
            await add_engine(fleet, slots(SLOW, {**SLOW, "vocab_size": 7})[1])
        assert await tokens(generate(fleet, "q", max_tokens=3)) == [11, 12, 13]

    with_fleet(test, SLOW)


def test_a_replica_that_is_never_ready_is_given_up() -> None:
    async def test(fleet: EngineFleet) -> None:
        assert fleet.engines._start_limit_s is not None
        fleet.engines._start_limit_s = 0.3
        with pytest.raises(EngineDeadError, match=r"replica 'r1' has come no further for 0\.3 s"):
            await add_engine(fleet, slots(SLOW, {**SLOW, "hang_s": 60.0})[1])
        assert list(fleet.engines.all) == ["r0"]
        assert await tokens(generate(fleet, "q", max_tokens=3)) == [11, 12, 13]

    with_fleet(test, SLOW)


def test_a_replica_that_differs_ends_the_start() -> None:
    with pytest.raises(ReplicaDiffersError):
        with_fleet(lambda fleet: tokens(generate(fleet, "q")), SLOW, {"vocab_size": 7})


def test_rolling_restarts_and_scaling_lose_no_token() -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = [generate(fleet, f"q{number}", max_tokens=120) for number in range(4)]
        reading = [asyncio.ensure_future(tokens(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        pids = {name: replica.pid for name, replica in fleet.engines.all.items()}
        for name in ("r0", "r1"):
            await fleet.engines.restart(name)
        assert all(fleet.engines.all[name].pid != pid for name, pid in pids.items())
        await add_engine(fleet, slots(SLOW, SLOW, SLOW)[2])
        assert await tokens(generate(fleet, "new", max_tokens=3)) == [11, 12, 13]
        await fleet.engines.remove("r0")
        await fleet.engines.remove("r2")
        assert list(fleet.engines.all) == ["r1"]
        with pytest.raises(ConfigurationError, match="only one"):
            await fleet.engines.remove("r1")
        with pytest.raises(ConfigurationError, match="no replica 'r9'"):
            await fleet.engines.restart("r9")
        assert await asyncio.gather(*reading) == [list(range(11, 131))] * 4

    with_fleet(test, SLOW, SLOW)


def test_numbers_are_of_all_replicas() -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = [generate(fleet, f"q{number}", max_tokens=3) for number in range(4)]
        await asyncio.gather(*[tokens(stream) for stream in streams])
        per_replica = [(await view.stats())["num_steps"] for view in fleet.engines_by_name.values()]
        assert _summed(
            [{"a": 1, "b": {"x": 2, "busy_share": 0.5}}, {"a": 3, "b": {"y": 5, "busy_share": 1.0}}]
        ) == {"a": 4, "b": {"x": 2, "busy_share": 0.75, "y": 5}}
        assert (await fleet.ask(GetStats()))["num_steps"] == sum(per_replica) > max(per_replica)
        assert (await fleet.find_adapter("name", "/somewhere")).digest == "digest"
        assert all(view.last_step_age_s < 5 for view in fleet.engines_by_name.values())

    with_fleet(test, {}, {})


def test_two_who_scale_at_once_get_what_the_last_one_wants() -> None:
    async def test(fleet: EngineFleet) -> None:
        await asyncio.gather(fleet.engines.scale(3), fleet.engines.scale(4))
        assert len(fleet.engines.all) == 4 == len(engines())
        await asyncio.gather(
            fleet.engines.scale(2), fleet.engines.restart("r0"), fleet.engines.scale(2)
        )
        assert len(fleet.engines.ready) == 2 == len(engines())

    with_fleet(test, SLOW)


def test_an_engine_with_the_name_of_one_that_was_ended_keeps_its_requests() -> None:
    async def test(fleet: EngineFleet) -> None:
        await fleet.engines.scale(2)
        ended = fleet.engines.all["0"]
        shutdown = ended.shutdown

        async def slowly(**more: Any) -> None:
            await asyncio.sleep(1.0)
            await shutdown(**more)

        ended.shutdown = slowly
        await asyncio.gather(fleet.engines.scale(1), fleet.engines.scale(2))
        assert fleet.engines.all["0"] is not ended
        assert fleet.dispatcher.replicas.get("0") is not None

    with_fleet(test, SLOW)


def test_an_engine_that_did_not_start_gives_its_place_back() -> None:
    async def test(fleet: EngineFleet) -> None:
        with pytest.raises(Exception, match="broken"):
            await add_engine(fleet, slots(SLOW, {"fail": "broken"})[1])
        assert fleet.engines.slots.returned == ["r1"]
        await add_engine(fleet, slots(SLOW, SLOW)[1])
        await fleet.engines.remove("r1")
        assert fleet.engines.slots.returned == ["r1", "r1"]

    with_fleet(test, SLOW)


def test_an_engine_that_is_starting_when_the_fleet_ends_starts_no_more() -> None:
    async def test(fleet: EngineFleet) -> None:
        adding = asyncio.ensure_future(fleet.engines.scale(3))
        await until(lambda: len(fleet.engines.all) == 2)
        await fleet.shutdown(drain=False, timeout_s=1)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(adding, 40)
        with pytest.raises(EngineDeadError, match="being shut down"):
            await fleet.engines.scale(3)

    with_fleet(test, {"hang_s": 0.3})


def test_a_replica_that_failed_for_good_makes_room_for_another() -> None:
    async def test(fleet: EngineFleet) -> None:
        failed = fleet.engines.all["r0"]
        assert failed.pid is not None
        os.kill(failed.pid, signal.SIGKILL)
        await until(lambda: failed.state is EngineState.FAILED)
        with pytest.raises(ConfigurationError, match="the only one"):
            await fleet.engines.remove("r1")
        await fleet.engines.scale(2)
        assert list(fleet.engines.all) == ["r1", "0"] and len(fleet.engines.ready) == 2

    with_fleet(test, SLOW, SLOW, recovery=RecoveryConfig(max_restarts=0))


def test_a_restart_waits_for_a_replica_that_is_being_started_anew() -> None:
    async def test(fleet: EngineFleet) -> None:
        engine = fleet.engines.all["r0"]
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state is EngineState.RECOVERING)
        await fleet.engines.restart("r0")
        assert engine.state is EngineState.READY and engine.num_restarts == 1

    with_fleet(test, SLOW, SLOW)


def test_the_fleet_fails_when_all_that_come_back_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(fleet: EngineFleet) -> None:
        reading = asyncio.ensure_future(tokens(generate(fleet, "q", max_tokens=10**6)))
        await asyncio.sleep(0.05)
        monkeypatch.setenv("FAKE_ENGINE", '{"facts": {"fingerprint": "of changed files"}}')
        for engine in list(fleet.engines.all.values()):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda engine=engine: engine.state is EngineState.CLOSING)
        with pytest.raises(EngineDeadError, match="all engines have failed"):
            await asyncio.wait_for(reading, 40)
        assert "fingerprint" in str(await asyncio.wait_for(fleet.wait_failed(), 40))

    with_fleet(test, SLOW, SLOW)


def test_an_adapter_is_looked_for_by_another_engine_where_one_has_died() -> None:
    async def test(fleet: EngineFleet) -> None:
        first = fleet.engines.all["r0"]
        assert first.pid is not None
        first.supervisor._restart = asyncio.sleep  # what was its machine is off for long
        os.kill(first.pid, signal.SIGSTOP)
        finding = asyncio.ensure_future(fleet.find_adapter("name", "/somewhere"))
        await asyncio.sleep(0)  # it is asked
        os.kill(first.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(finding, 40)).digest == "digest"
        with pytest.raises((AdapterError, EngineDeadError)):
            await asyncio.wait_for(fleet.find_adapter("kills", "/somewhere"), 40)

    with_fleet(test, SLOW, SLOW)


def test_the_fleet_fails_with_its_last_replica() -> None:
    async def test(fleet: EngineFleet) -> None:
        reading = asyncio.ensure_future(tokens(generate(fleet, "q", max_tokens=10**6)))
        for replica in list(fleet.engines.all.values()):
            while replica.state is not EngineState.FAILED:
                if replica.state is EngineState.READY and replica.pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # dead, and not yet reported
                        os.kill(replica.pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
        assert "more than 0 times" in str(await fleet.wait_failed())
        assert fleet.state is EngineState.FAILED and not fleet.is_alive
        with pytest.raises(EngineDeadError, match="all engines have failed"):
            await reading
        with pytest.raises(EngineDeadError):
            fleet.check_room(1)

    with_fleet(test, SLOW, SLOW, recovery=RecoveryConfig(max_restarts=0))


def test_where_no_other_takes_requests_a_drain_does_not_wait() -> None:
    async def test(fleet: EngineFleet) -> None:
        reading = asyncio.ensure_future(tokens(generate(fleet, "q", max_tokens=30)))
        await asyncio.sleep(0.05)
        restarting = asyncio.ensure_future(fleet.engines.restart("r0", 600.0))
        new = asyncio.ensure_future(tokens(generate(fleet, "new", max_tokens=2)))
        await asyncio.wait_for(restarting, 20)
        assert len(await asyncio.wait_for(reading, 20)) == 30
        assert len(await asyncio.wait_for(new, 20)) == 2

    with_fleet(test, SLOW)


def test_an_adapter_is_waited_for_while_no_engine_is_ready() -> None:
    async def test(fleet: EngineFleet) -> None:
        engine = fleet.engines.all["r0"]
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: fleet.state is EngineState.RECOVERING)
        found = await asyncio.wait_for(fleet.find_adapter("name", "/somewhere"), 20)
        assert found.digest == "digest"

    with_fleet(test, SLOW)


def test_the_fleet_fails_where_the_last_start_fails() -> None:
    async def test(fleet: EngineFleet) -> None:
        engine = fleet.engines.all["r0"]
        refused = ConfigurationError("it can't be built")

        async def fails_after_the_other(self: Supervisor) -> None:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.state is EngineState.FAILED)
            raise refused

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Supervisor, "start", fails_after_the_other)
            with pytest.raises(ConfigurationError):
                await add_engine(fleet, *slots({}, {})[1:])
        assert await asyncio.wait_for(fleet.wait_failed(), 40) is refused
        assert fleet.state is EngineState.FAILED

    with_fleet(test, SLOW, recovery=RecoveryConfig(max_restarts=0))


def test_the_router_hears_how_slow_engines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness_poller, "ASK_EVERY_S", 0.02)

    async def test(fleet: EngineFleet) -> None:
        placement = fleet.dispatcher.placement
        assert isinstance(placement, LeastOpen)
        plain = fleet.engines.all["r0"].stats
        stopped = fleet.engines.all["r1"]

        async def slow(timeout_s: float = 10.0) -> dict[str, Any]:
            return await plain(timeout_s) | {"utilization": {"slowness": 2.5}}

        async def gone(timeout_s: float = 10.0) -> dict[str, Any]:
            raise EngineDeadError("it is gone")

        monkeypatch.setattr(fleet.engines.all["r0"], "stats", slow)
        monkeypatch.setattr(stopped, "stats", gone)
        await until(lambda: placement.slowness == {"r0": 2.5})
        placement.slowness.clear()
        await until(lambda: placement.slowness == {"r0": 2.5})
        monkeypatch.setattr(fleet.engines.all["r0"], "stats", plain)
        await until(lambda: placement.slowness == {"r0": 1.0})  # it has had no steps for long

    with_fleet(test, {}, {})


MEASURED = {
    "step_s": 0.01,
    "facts": {
        "step_costs": costs(1e-6),
        **{"max_num_seqs": 8, "num_blocks": 64, "block_size": 16},
        "max_num_batched_tokens": 64,
    },
}
"""An engine that knows how long its steps take."""


def test_streams_of_a_stopped_replica_go_on_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    # Even on a busy machine the other replica answers within a second.
    monkeypatch.setattr(silence_watch, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(silence_watch, "LEAST_SILENCE_S", 1.0)

    async def test(fleet: EngineFleet) -> None:
        streams = [generate(fleet, f"q{number}", max_tokens=40) for number in range(4)]
        replicas = fleet.dispatcher.replicas
        await until(lambda: all(has_begun(replica, 2) for _, replica in replicas))
        stopped = fleet.engines.all["r0"]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            assert await asyncio.wait_for(tokens_of_all(streams), 40) == [COUNT] * 4
            assert fleet.engines.overview()["r0"]["is_silent"]
            with pytest.raises(ConfigurationError, match="'r1' is the only one that takes"):
                await fleet.engines.scale(1)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        await until(lambda: replicas.get("r0").accepts)
        assert fleet.num_restarts == 0 and fleet.dispatcher.num_moved == 2

    with_fleet(test, MEASURED, MEASURED)


def test_requests_stay_with_a_replica_whose_step_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence_watch, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(silence_watch, "LEAST_SILENCE_S", 0.2)
    monkeypatch.setattr(silence_watch, "processor_s", lambda pid: asyncio.get_running_loop().time())

    async def test(fleet: EngineFleet) -> None:
        stream = generate(fleet, "q", max_tokens=40)
        replica = fleet.dispatcher.replicas.get("r0")
        await until(lambda: has_begun(replica, 1))
        stopped = fleet.engines.all["r0"]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        await asyncio.sleep(0.6)
        assert replica.accepts and list(replica.requests) == ["q"]
        os.kill(stopped.pid, signal.SIGCONT)
        assert await tokens(stream) == COUNT

    with_fleet(test, MEASURED, MEASURED)


def has_begun(replica: ConnectedReplica, num_requests: int) -> bool:
    """Whether the replica has sent tokens of that number of requests, which are all of its."""
    return len(replica.requests) == num_requests and not replica.without_tokens


async def tokens_of_all(streams: list[Pulled]) -> list[list[int]]:
    return list(await asyncio.gather(*map(tokens, streams)))


def test_a_requested_restart_is_neither_a_death_nor_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def test(fleet: EngineFleet) -> None:
        await fleet.engines.restart("r0")
        found = fleet.engines.overview()["r0"]
        assert (found["num_restarts"], found["num_requested_restarts"]) == (0, 1)
        assert "replica r0 was stopped as requested" in caplog.text
        await fleet.engines.scale(1)
        assert "replica r1 was stopped as requested" in caplog.text

    with_fleet(test, SLOW, SLOW)
    assert "replica r0 was stopped for the shutdown" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
