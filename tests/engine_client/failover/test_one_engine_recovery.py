"""Streams over processes that die, hang or can't be had any more: what their clients notice."""

import asyncio
import dataclasses
import os
import random
import signal

import pytest
from tests.engine_client.engine_harness import (
    ENDLESS,
    collect,
    pid_of,
    pull,
    request,
    tokens_of,
    with_engine,
)
from tests.engine_client.fake_engine_process import EXIT, HANG, RAISE, SEGFAULT

from quire.engine_client.recovery import EngineState, RecoveryConfig
from quire.errors import EngineDeadError, OverloadedError, RequestKillsEngineError

pytestmark = pytest.mark.usefixtures("forked_engines")

PATIENT = RecoveryConfig(max_restarts=9, first_backoff_s=0.01)
IMPATIENT = dataclasses.replace(PATIENT, heartbeat_timeout_s=1.0)


def kill(engine):
    os.kill(pid_of(engine), signal.SIGKILL)


async def wait_for_death(engine, num_restarts=0):
    """Until the present process is known to be gone, or another one was started."""
    while engine.state is EngineState.READY and engine.num_restarts == num_restarts:
        await asyncio.sleep(0.002)


def test_streams_notice_nothing_of_a_killed_process():
    async def test(engine):
        asked = [request(f"r{i}", 10 * i, max_tokens=90 + i, n=1 + i % 3) for i in range(1, 13)]
        readers = [asyncio.ensure_future(collect(pull(engine, sent))) for sent in asked]
        for kills in range(2):
            # All are in the process, and have been for some steps: nobody is on trial any more.
            while (stats := await stats_soon(engine))["num_running"] < engine.num_open:
                pass
            until = stats["num_steps"] + 5
            while (await engine.stats())["num_steps"] < until:
                pass
            kill(engine)
            await wait_for_death(engine, kills)
        for sent, reader in zip(asked, readers, strict=True):
            outputs = await reader
            first = sent.prompt_token_ids[-1] + 1
            for branch in range(sent.n):
                expected = list(range(first, first + sent.params.max_tokens))
                assert tokens_of(outputs, sent.request_id, branch) == expected
        assert (engine.num_restarts, engine.num_open) == (2, 0)
        assert engine.state is EngineState.READY

    with_engine(test, {"step_s": 0.01})


def test_calls_notice_nothing_of_a_process_that_is_told_to_end():
    async def test(engine):
        open_one = pull(engine, request("a", 10, max_tokens=60))
        first = await anext(open_one)
        os.kill(pid_of(engine), signal.SIGTERM)
        late = [collect(pull(engine, request(f"l{i}", 20, max_tokens=5))) for i in range(3)]
        for index, outputs in enumerate(await asyncio.gather(*late)):
            assert tokens_of(outputs, f"l{index}") == [21, 22, 23, 24, 25]
        assert tokens_of([first, *await collect(open_one)], "a") == list(range(11, 71))
        assert (engine.num_restarts, engine.num_open) == (1, 0)

    with_engine(test, {"step_s": 0.005}, recovery=PATIENT)


@pytest.mark.parametrize("killer", [[EXIT, 3], [RAISE, 0], [HANG, 2], [SEGFAULT, 5]])
def test_a_request_that_kills_the_engine_twice_is_ended_alone(killer):
    async def test(engine):
        readers = [
            asyncio.ensure_future(collect(pull(engine, request(f"r{i}", 10, max_tokens=60))))
            for i in range(3)
        ]
        stream = pull(engine, request("killer", *killer, max_tokens=50))
        late = asyncio.ensure_future(collect(pull(engine, request("late", 10, max_tokens=9))))
        with pytest.raises(RequestKillsEngineError, match="died repeatedly") as caught:
            await collect(stream)
        assert (caught.value.http_status, caught.value.code) == (500, "request_kills_engine")
        for name, reader in enumerate(readers):
            assert tokens_of(await reader, f"r{name}") == list(range(11, 71))
        assert tokens_of(await late, "late") == list(range(11, 20))
        # Two, if it was the first suspect, and so alone.
        assert engine.num_restarts in (2, 3) and engine.num_open == 0

    recovery = IMPATIENT if killer[0] == HANG else PATIENT
    with_engine(test, {"step_s": 0.001}, recovery=recovery)


def test_a_client_that_leaves_a_hung_step_causes_no_blame():
    async def test(engine):
        other = asyncio.ensure_future(collect(pull(engine, request("other", max_tokens=30))))
        async with pull(engine, request("killer", HANG, 2, max_tokens=9)) as stream:
            for _ in range(2):
                await anext(stream)
            while not engine.num_restarts:
                await asyncio.sleep(0.01)
            while (await stats_soon(engine))["num_steps"] == 0:
                pass
        assert tokens_of(await other, "other") == list(range(11, 41))

    with_engine(test, {"step_s": 0.005}, recovery=IMPATIENT)


async def stats_soon(engine):
    """As soon as there is a process that answers."""
    while True:
        try:
            return await engine.stats()
        except EngineDeadError:
            await asyncio.sleep(0.005)


def test_requests_that_come_while_it_recovers_are_served_and_bounded():
    async def test(engine):
        reader = asyncio.ensure_future(collect(pull(engine, request("a", max_tokens=60))))
        await engine.stats()
        kill(engine)
        await wait_for_death(engine)
        assert engine.state is EngineState.RECOVERING and engine.is_alive
        with pytest.raises(EngineDeadError, match="being started again"):
            await engine.stats()
        new = asyncio.ensure_future(collect(pull(engine, request("b", max_tokens=5))))
        with pytest.raises(OverloadedError):
            pull(engine, request("c", n=2))
        given_up = pull(engine, request("d"))
        given_up.close()
        assert tokens_of(await reader, "a") == list(range(11, 71))
        assert tokens_of(await new, "b") == list(range(11, 16))
        assert (await engine.stats())["num_held_blocks"] == 0

    with_engine(test, {"step_s": 0.01}, max_queued_requests=3)


def test_branches_that_were_aborted_are_not_resumed():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=60, n=3)) as stream:
            outputs = [await anext(stream)]
            stream.abort_branch("a", 1)
            kill(engine)
            await wait_for_death(engine)
            stream.abort_branch("a", 2)
            outputs += [output async for output in stream]
        assert tokens_of(outputs, "a", 0) == list(range(11, 71))
        assert len(tokens_of(outputs, "a", 1)) < 60 and len(tokens_of(outputs, "a", 2)) < 60

    with_engine(test, {"step_s": 0.01})


def test_all_clients_get_an_error_when_the_engine_fails_for_good():
    async def test(engine):
        streams = [pull(engine, request(f"r{i}", max_tokens=ENDLESS)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        kill(engine)
        error = await engine.wait_failed()
        assert "died more than 0 times within 300 s" in str(error) and "SIGKILL" in str(error)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="failed for good; the server's log"):
                await collect(stream)
        assert engine.state is EngineState.FAILED
        assert not engine.is_alive and engine.num_open == 0
        with pytest.raises(EngineDeadError):
            pull(engine, request("late"))
        with pytest.raises(EngineDeadError):
            await engine.stats()

    with_engine(test, recovery=RecoveryConfig(max_restarts=0))


@pytest.mark.parametrize("seed", range(2))
def test_random_deaths_and_departures_change_no_other_tokens(seed):
    async def test(engine):
        rng = random.Random(seed)
        wanted = {}

        async def client(name):
            await asyncio.sleep(rng.uniform(0, 0.5))
            sent = request(name, rng.randint(1, 500), max_tokens=rng.randint(1, 40))
            stays = rng.random() < 0.8
            async with pull(engine, sent) as stream:
                found = []
                async for output in stream:
                    found += output.token_ids
                    if not stays and len(found) > 5:
                        return
            first = sent.prompt_token_ids[-1] + 1
            wanted[name] = (found, list(range(first, first + sent.params.max_tokens)))

        async def killer():
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0.05, 0.4))
                if pid_of(engine) is not None and engine.state is EngineState.READY:
                    kill(engine)

        clients = [client(f"r{index}") for index in range(25)]
        await asyncio.gather(killer(), *clients)
        assert len(wanted) >= 15
        assert all(found == expected for found, expected in wanted.values())
        assert engine.num_restarts >= 1 and engine.num_open == 0
        while (await stats_soon(engine))["num_held_blocks"]:
            await asyncio.sleep(0.005)

    with_engine(test, {"step_s": 0.003}, recovery=PATIENT)
