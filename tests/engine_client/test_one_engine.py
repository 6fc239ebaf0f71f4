"""The server's side: streams from real processes over real sockets, with a fake engine inside."""

import asyncio
import subprocess
import sys
import textwrap

import psutil
import pytest
from tests.engine_client.engine_harness import (
    ENDLESS,
    collect,
    own_processes,
    pid_of,
    pull,
    request,
    tokens_of,
    wait_until_free,
    with_engine,
)
from tests.engine_client.fake_engine_process import COMMAND, REFUSE

from quire.engine_client.messages import GetBlocks, GetMemory, GetStats
from quire.engine_client.one_engine import start_one_engine
from quire.engine_client.recovery import EngineState
from quire.errors import (
    AdapterError,
    CheckpointError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    ServerDrainingError,
)

pytestmark = pytest.mark.usefixtures("forked_engines")

WAIT_S = 60.0


def test_streams_bring_each_request_its_own_tokens():
    async def test(engine):
        assert engine.limits.vocab_size == 4096
        streams = [pull(engine, request(f"r{i}", i, n=2)) for i in range(1, 30)]
        assert engine.num_open == 58
        results = await asyncio.gather(*map(collect, streams))
        for index, outputs in enumerate(results, start=1):
            for branch in (0, 1):
                expected = [index + 1, index + 2, index + 3]
                assert tokens_of(outputs, f"r{index}", branch) == expected
        assert engine.num_open == 0

    with_engine(test)


def test_a_started_engine_has_state_limits_and_facts():
    told = []

    async def test(engine):
        assert engine.state is EngineState.READY and engine.is_alive
        assert engine.limits.vocab_size == 4096
        assert engine.facts == {"kernels": "fake", "num_blocks": 12}
        assert psutil.pid_exists(pid_of(engine)) and engine.num_restarts == 0
        (only,) = engine.engines_by_name.values()
        assert 0 <= only.last_step_age_s < WAIT_S

    with_engine(test, {"num_progress": 2}, on_progress=lambda *news: told.append(news))
    assert told == [("loading nothing", 1, 2), ("loading nothing", 2, 2)]


def test_streams_are_told_why_the_engine_was_shut_down():
    async def test(engine):
        stream = pull(engine, request("a", max_tokens=ENDLESS))
        await anext(stream)
        reason = ServerDrainingError("the server ends")
        await engine.shutdown(drain=False, timeout_s=WAIT_S, reason=reason)
        with pytest.raises(ServerDrainingError, match="the server ends"):
            await collect(stream)
        with pytest.raises(EngineDeadError):
            pull(engine, request("late"))

    with_engine(test)


def test_one_stream_carries_several_requests():
    async def test(engine):
        outputs = await collect(
            pull(engine, request("a", 10, max_tokens=2), request("b", 20, max_tokens=4))
        )
        assert tokens_of(outputs, "a") == [11, 12]
        assert tokens_of(outputs, "b") == [21, 22, 23, 24]

    with_engine(test)


def test_closing_a_stream_aborts_its_requests():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=ENDLESS, n=3)) as stream:
            await anext(stream)
        assert engine.num_open == 0
        stats = await engine.stats()  # read after the abort and before the next step
        assert stats["num_held_blocks"] == 0
        assert len(stats["aborted"]) == 3

    with_engine(test)


def test_cancelling_the_reader_aborts_the_request():
    async def test(engine):
        reader = asyncio.ensure_future(collect(pull(engine, request("a", max_tokens=ENDLESS))))
        while not (await engine.stats())["num_steps"]:
            pass
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await engine.stats())["num_held_blocks"] == 0

    with_engine(test)


def test_aborting_a_branch_leaves_the_others():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=50, n=2)) as stream:
            outputs = [await anext(stream)]
            stream.abort_branch("a", 1)
            stream.abort_branch("a", 1)
            stream.abort_branch("a", 7)
            outputs += [output async for output in stream]
        assert tokens_of(outputs, "a", 0) == list(range(11, 61))
        assert len(tokens_of(outputs, "a", 1)) < 50
        assert (await engine.stats())["aborted"] == [["a", 1]]

    with_engine(test, {"step_s": 0.02})


def test_aborting_the_last_branch_ends_the_stream():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=ENDLESS)) as stream:
            await anext(stream)
            stream.abort_branch("a", 0)
            async for _ in stream:
                pass
        assert engine.num_open == 0
        engine.dispatcher.abort("a")
        await wait_until_free(engine)

    with_engine(test)


def test_a_refused_request_raises_what_the_engine_raised_and_others_go_on():
    async def test(engine):
        with pytest.raises(PromptTooLongError, match="the prompt is refused") as caught:
            await collect(pull(engine, request("bad", REFUSE), request("x", max_tokens=ENDLESS)))
        assert caught.value.param == "prompt"
        assert tokens_of(await collect(pull(engine, request("a"))), "a") == [11, 12, 13]
        await wait_until_free(engine)  # "x" shared the stream of "bad" and was aborted with it

    with_engine(test)


def test_open_requests_are_bounded():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=ENDLESS)):
            with pytest.raises(
                OverloadedError, match="too many generations open to take 2 more"
            ) as caught:
                pull(engine, request("b"), request("c"))
            assert caught.value.retry_after_s > 0
            with pytest.raises(InvalidRequestError, match="3 generations at once"):
                pull(engine, request("b", n=2), request("c"))
            assert await collect(pull(engine, request("b")))
        assert len(await collect(pull(engine, request("b"), request("c")))) == 6

    with_engine(test, max_queued_requests=2)


def test_request_ids_must_be_unique():
    async def test(engine):
        with pytest.raises(InvalidRequestError, match="unique"):
            pull(engine, request("a"), request("a"))
        async with pull(engine, request("a", max_tokens=ENDLESS)):
            with pytest.raises(InvalidRequestError, match="unique"):
                pull(engine, request("a"))

    with_engine(test)


def test_numbers_that_no_message_carries_are_the_requests_fault():
    async def test(engine):
        with pytest.raises(InvalidRequestError, match="AddRequest can't be sent"):
            pull(engine, request("a", 2**70))
        assert engine.num_open == 0

    with_engine(test)


def test_an_engine_that_cannot_be_built_raises_its_own_error():
    async def start():
        await start_one_engine({"fail": "no config.json in /x"}, command=COMMAND)

    before = own_processes()
    with pytest.raises(CheckpointError, match=r"no config\.json in /x"):
        asyncio.run(start())
    assert own_processes() == before


def test_an_engine_that_dies_without_a_word_while_it_starts():
    async def start():
        await start_one_engine({}, command=(sys.executable, "-c", "raise SystemExit(3)"))

    with pytest.raises(EngineDeadError, match="exit code 3"):
        asyncio.run(start())


def test_a_process_that_is_no_engine_is_refused_and_ended():
    talk = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[2]));"
    talk += "s.sendall(b'HTTP/1.1 200'); time.sleep(600)"

    async def start():
        await start_one_engine({}, command=(sys.executable, "-c", talk))

    before = own_processes()
    with pytest.raises(EngineDeadError, match="above the bound"):
        asyncio.run(start())
    assert own_processes() == before


def test_a_start_that_is_cancelled_leaves_no_process():
    async def start():
        before = own_processes()
        starting = start_one_engine({"hang_s": 600}, command=COMMAND)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(starting, 0.3)
        assert own_processes() == before

    asyncio.run(start())


def test_a_stuck_engine_does_not_answer_and_says_so():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=5)) as stream:
            await anext(stream)
            with pytest.raises(EngineDeadError, match=r"not answered for 0\.2 s"):
                while True:  # the first question may come before the step that hangs
                    await engine.stats(timeout_s=0.2)

    with_engine(test, {"hang_at_step": 2})


def test_a_late_answer_does_not_reach_the_wrong_question():
    async def test(engine):
        async with pull(engine, request("a", max_tokens=ENDLESS)):
            with pytest.raises(EngineDeadError):
                await engine.stats(timeout_s=0.0)
            first = await engine.stats()
            second = await engine.stats()
            assert first["num_steps"] <= second["num_steps"]

    with_engine(test, {"step_s": 0.02})


def test_questions_asked_at_once_get_their_own_answers():
    async def test(engine):
        questions = [GetBlocks(5, 2), GetStats(), GetMemory(), GetBlocks(0, 1)]
        blocks, stats, memory, first = await asyncio.gather(*map(engine.ask, questions))
        assert [block["block"] for block in blocks["blocks"]] == [5, 6]
        assert stats == await engine.stats()
        assert memory["free_bytes"] == 12 * 64
        assert [block["block"] for block in first["blocks"]] == [0]

    with_engine(test)


def test_an_adapter_that_ends_the_process_is_not_read_again_and_again():
    async def test(engine):
        assert (await engine.find_adapter("a", "/a")).digest == "digest"
        for _ in range(2):
            with pytest.raises(AdapterError, match="adapter 'kills': 2 engine processes died"):
                await engine.find_adapter("kills", "/b")
        assert (await engine.find_adapter("a", "/a")).digest == "digest"
        assert engine.num_restarts == 2 and not engine.engines.failed.done()

    with_engine(test)


def test_shutdown_drains_what_is_open_and_refuses_what_is_new():
    async def test(engine):
        reader = asyncio.ensure_future(collect(pull(engine, request("a", max_tokens=20))))
        while not (await engine.stats())["num_steps"]:
            pass
        ending = asyncio.ensure_future(engine.shutdown(drain=True, timeout_s=WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            pull(engine, request("late"))
        assert tokens_of(await reader, "a") == list(range(11, 31))
        await ending
        assert pid_of(engine) is None and engine.state is EngineState.CLOSING
        await engine.shutdown()

    with_engine(test, {"step_s": 0.005})


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_ends_a_process_that_does_not_listen(drain):
    async def test(engine):
        reader = asyncio.ensure_future(collect(pull(engine, request("a", max_tokens=9))))
        await asyncio.sleep(0)
        await engine.shutdown(drain=drain, timeout_s=0.3)
        assert pid_of(engine) is None and engine.state is EngineState.CLOSING
        with pytest.raises(EngineDeadError, match="shut down before"):
            await reader

    with_engine(test, {"hang_at_step": 2})


def test_engine_ends_when_the_api_server_is_killed():
    program = textwrap.dedent(
        f"""
        import asyncio
        from quire.core.request import Request
        from quire.core.sampling_params import DecodingParams
        from quire.engine_client.one_engine import start_one_engine


        class Sink:
            def on_output(self, output):
                if not first_output.done():
                    first_output.set_result(None)

        async def main():
            global first_output
            first_output = asyncio.get_running_loop().create_future()
            engine = await start_one_engine({{}}, command={COMMAND!r})
            engine.generate([Request("a", [1], DecodingParams(max_tokens=10**9))], Sink())
            await first_output
            print(engine.engines_by_name[''].pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    api_server = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    with api_server:
        engine = psutil.Process(int(api_server.stdout.readline()))
        api_server.kill()
        psutil.wait_procs([engine], timeout=20)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_api_server_imports_no_torch():
    program = "import sys, quire.engine_client.one_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
