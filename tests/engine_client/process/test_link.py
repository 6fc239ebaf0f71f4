"""One process and its socket: real processes, with a fake engine inside them."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import pytest
from tests.engine_client.fake_engine_process import (
    COMMAND,
    EXIT,
    HANG,
    KILL_ADDING,
    RAISE,
    SEGFAULT,
)

from quire.core.adapters import AdapterRef
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import (
    AdapterReply,
    AddRequest,
    FindAdapter,
    GetBlocks,
    GetMemory,
    GetStats,
    Outputs,
    Ping,
    Progress,
    Ready,
    Shutdown,
    Start,
    decode_to_engine,
)
from quire.engine_client.process import link as link_module
from quire.engine_client.process import process_link
from quire.engine_client.process.activity import Doing
from quire.engine_client.process.link import AdapterCalls, EngineLink
from quire.engine_client.process.process_link import ProcessLink
from quire.engine_client.recovery import Death
from quire.errors import CheckpointError, EngineDeadError, QuireError
from quire.ipc import encode

WAIT_S = 60.0


class Owner:
    """The owner of a link, and the listener of its outputs: keeps what comes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.death: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()

    def on_ready(self, link: EngineLink, ready: Ready) -> None:
        self.ready.set_result(ready)

    def on_message(self, link: EngineLink, message: Any) -> None:
        assert not self.death.done(), "nothing comes after the death"
        self.messages.append(message)

    on_progress = on_message

    def on_death(self, link: EngineLink, error: QuireError, death: Death) -> None:
        self.death.set_result(error)  # raises if it is told twice
        self.evidence = death


@contextlib.asynccontextmanager
async def opened(
    options: dict[str, Any] | None = None, command: Any = COMMAND
) -> AsyncIterator[tuple[EngineLink, Owner]]:
    owner = Owner()
    link = ProcessLink(owner, owner, command)
    assert link.pid is None and not link.is_open
    await link.open(encode(Start(options or {})))
    try:
        yield link, owner
    finally:
        await link.close()
        assert link.pid is not None and not psutil.pid_exists(link.pid)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))  # type: ignore[arg-type]


def add(*prompt: int, max_tokens: int = 10**9) -> bytes:
    return encode(AddRequest(Request("a", list(prompt), DecodingParams(max_tokens))))


def test_progress_and_ready_are_told_and_questions_are_answered_in_their_order() -> None:
    async def test() -> None:
        async with opened({"num_progress": 2}) as (link, owner):
            ready = await owner.ready
            assert ready.limits.vocab_size == 4096 and ready.facts["kernels"] == "fake"
            assert owner.messages == [Progress("loading nothing", done, 2) for done in (1, 2)]
            questions = [GetBlocks(5, 2), GetStats(), Ping(), GetMemory(), GetBlocks(0, 1)]
            blocks, stats, pong, memory, first = await asyncio.gather(*map(link.ask, questions))
            assert [block["block"] for block in blocks["blocks"]] == [5, 6]
            assert stats["num_steps"] == 0 and pong == {}
            assert memory["free_bytes"] == 12 * 64
            assert [block["block"] for block in first["blocks"]] == [0]

    run(test)


def test_messages_sent_before_the_death_arrive_before_it() -> None:
    async def test() -> None:
        async with opened() as (link, owner):
            await owner.ready
            link.send(add(10, max_tokens=3) + encode(Shutdown(drain=True)))
            await link.wait_dead()
            error = owner.death.result()
            assert str(error) == "the engine process has ended with exit code 0"
            tokens = [message.outputs[0].token_ids for message in owner.messages]
            assert tokens == [[11], [12], [13]]
            link.send(add(10))  # to nobody

    run(test)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"fail": "no config.json"}, CheckpointError, r"no config\.json"),
        ({"crash": "oops"}, EngineDeadError, "ZeroDivisionError: oops"),
    ],
)
def test_why_an_engine_could_not_be_built(
    options: dict[str, Any], kind: type[QuireError], reason: str
) -> None:
    async def test() -> None:
        async with opened(options) as (_, owner):
            error = await owner.death
            assert type(error) is kind
            with pytest.raises(kind, match=reason):
                raise error

    run(test)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3$"),
        ("import os; os.kill(os.getpid(), 11)", r"by signal 11 \(SIGSEGV\)$"),
        ("import os; os.kill(os.getpid(), 40)", r"by signal 40$"),
        ("import no_such_module", "exit code 1: ModuleNotFoundError: No module named 'no_such_mod"),
        (
            "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[2]));"
            "s.sendall(b'HTTP/1.1 200'); time.sleep(600)",
            "above the bound",
        ),
    ],
)
def test_a_process_that_is_no_engine(program: str, reason: str) -> None:
    async def test() -> None:
        async with opened(command=(sys.executable, "-c", program)) as (_, owner):
            with pytest.raises(EngineDeadError, match=reason):
                raise await owner.death

    run(test)


@pytest.mark.parametrize(
    ("counts", "reason", "num_oom_kills"),
    [
        ([None, None], r"SIGKILL\); the system does that when memory runs out$", None),
        ([4, None], r"SIGKILL\); the system does that when memory runs out$", None),
        ([4, 4], r"SIGKILL\), from outside: the system has killed nothing here for lack of", 0),
        ([4, 5], r"SIGKILL\): the system did that because memory ran out$", 1),
    ],
)
def test_a_process_that_is_killed(
    monkeypatch: pytest.MonkeyPatch,
    counts: list[int | None],
    reason: str,
    num_oom_kills: int | None,
) -> None:
    """The system's count is asked for when the process is started, and when it has ended."""
    answers = iter(counts)
    monkeypatch.setattr(process_link, "num_oom_kills", lambda: next(answers))

    async def test() -> None:
        program = "import os; os.kill(os.getpid(), 9)"
        async with opened(command=(sys.executable, "-c", program)) as (_, owner):
            with pytest.raises(EngineDeadError, match=reason):
                raise await owner.death
            death = owner.evidence
            assert (death.status, death.num_oom_kills) == (-9, num_oom_kills)
            assert death.activity.doing is Doing.LOADING and not death.has_failed

    run(test)


@pytest.mark.parametrize(
    ("options", "prompt", "expected"),
    [
        # What kills it -> what it was doing, for whom, how it ended, and whether it said why.
        ({}, (EXIT, 2), (Doing.COMPUTING, {"a"}, 7, False)),
        ({}, (RAISE, 0), (Doing.COMPUTING, {"a"}, 1, True)),
        ({}, (SEGFAULT, 2), (Doing.COMPUTING, {"a"}, -11, False)),
        ({}, (KILL_ADDING,), (Doing.TAKING_IN, {"a"}, -9, False)),
        ({}, (), (Doing.IDLE, set(), -9, False)),
        ({"step_s": 600.0}, (10,), (Doing.COMPUTING, {"a"}, -9, False)),
        ({"crash": "oops"}, None, (Doing.LOADING, set(), 1, True)),
    ],
)
def test_a_death_carries_status_and_activity(
    options: dict[str, Any],
    prompt: tuple[int, ...] | None,
    expected: tuple[Doing, set[str], int, bool],
) -> None:
    async def test() -> None:
        async with opened(options) as (link, owner):
            if prompt is not None:
                await owner.ready
                if prompt:
                    link.send(add(*prompt))
                else:
                    await link.ask(Ping())
                assert link.pid is not None and link._record is not None
                if expected[2] == -9 and prompt[:1] != (KILL_ADDING,):
                    while link._record.read() != expected[:2]:
                        await asyncio.sleep(0.002)
                    os.kill(link.pid, signal.SIGKILL)
            await owner.death
            death = owner.evidence
            assert (*death.activity, death.status, death.has_failed) == expected

    run(test)


def test_open_questions_fail_when_the_process_dies() -> None:
    async def test() -> None:
        async with opened({"step_s": 600.0}) as (link, owner):
            await owner.ready
            link.send(add(10))
            # Messages that arrive before the step starts would still be answered.
            assert link.pid is not None and link._record is not None
            while link._record.read()[0] is not Doing.COMPUTING:
                await asyncio.sleep(0.002)
            called: list[int] = []
            link.call_between_steps(lambda: called.append(1))
            answers = [link.ask(GetStats()) for _ in range(2)]
            await asyncio.sleep(0)
            os.kill(link.pid, signal.SIGKILL)
            for answer in answers:
                with pytest.raises(EngineDeadError, match="died before it had answered"):
                    await answer
            await link.wait_dead()
            assert not called

    run(test)


def test_a_call_comes_when_the_process_has_taken_in_what_was_sent() -> None:
    async def test() -> None:
        async with opened() as (link, owner):
            await owner.ready
            link.send(add(10))
            called = asyncio.Event()
            link.call_between_steps(called.set)
            await called.wait()
            assert (await link.ask(GetStats()))["num_running"] == 1

    run(test)


def test_a_process_that_hangs_in_a_step_is_killed() -> None:
    async def test() -> None:
        async with opened() as (link, owner):
            await owner.ready
            link.watch(1.0)
            link.send(add(HANG, 3))
            error = await owner.death
            assert "its step had not ended after 1 s" in str(error)
            assert owner.evidence.has_hung and owner.evidence.status is None
            assert sum(isinstance(message, Outputs) for message in owner.messages) == 3

    run(test)


def test_a_process_that_can_not_be_ended_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that waits in the kernel, which no signal ends."""
    for module in (link_module, process_link):
        monkeypatch.setattr(module, "UNDEAD_S", 0.2)
    monkeypatch.setattr(process_link, "_REAP_TIMEOUT_S", 0.1)

    async def test() -> None:
        async with opened() as (link, owner):
            await owner.ready
            assert isinstance(link, ProcessLink) and link._process is not None
            os.kill(link._process.pid, signal.SIGSTOP)
            monkeypatch.setattr(link._process, "kill", lambda: None)
            link.kill("it hangs")
            assert "has ended: it hangs" in str(await owner.death)
            assert owner.evidence.status is None
            os.kill(link._process.pid, signal.SIGKILL)
            await link._process.wait()

    run(test)
    assert "can't be ended; it is left behind" in caplog.text


def test_reply_to_an_earlier_link_resolves_no_question() -> None:
    async def test() -> None:
        sent: list[bytes] = []
        earlier, now = AdapterCalls(sent.append), AdapterCalls(sent.append)
        old = earlier.find("x", "/x", False)
        new = now.find("y", "/y", False)
        (asked, _) = (decode_to_engine(frame[4:]) for frame in sent)
        assert isinstance(asked, FindAdapter)
        now.resolve(AdapterReply(asked.find_id, AdapterRef("x", "/x", "digest")))
        assert not old.done() and not new.done() and len(now.waiters) == 1

    run(test)


def test_a_process_that_works_or_idles_is_left_alone() -> None:
    async def test() -> None:
        async with opened({"step_s": 0.05}) as (link, owner):
            await owner.ready
            link.watch(4.0)
            before_s = link.last_heard_s
            link.send(add(10, max_tokens=20))
            while len(owner.messages) < 20:
                await asyncio.sleep(0.01)
            assert link.last_heard_s > before_s
            assert not owner.death.done()
            await link.close()
            assert "it was shut down" in str(owner.death.result())

    run(test)


def test_process_is_not_hung_if_the_api_server_itself_paused() -> None:
    async def test() -> None:
        async with opened() as (link, owner):
            await owner.ready
            link.watch(0.4)
            time.sleep(1.0)  # the API server does something else; the answer comes, and lies unread
            await link.ask(Ping())
            await asyncio.sleep(0)
            assert not owner.death.done() and link._killed_because is None

    run(test)


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def test() -> None:
        before, owner = psutil.Process().children(), Owner()
        link = ProcessLink(owner, owner, COMMAND)
        opening = asyncio.ensure_future(link.open(encode(Start({}))))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await link.close()
        assert psutil.Process().children() == before

    run(test)


def test_a_command_that_cannot_start_raises_at_once() -> None:
    async def test() -> None:
        owner = Owner()
        with pytest.raises(FileNotFoundError):
            await ProcessLink(owner, owner, ("./no-such-program",)).open(b"")
        assert not owner.death.done()

    run(test)
