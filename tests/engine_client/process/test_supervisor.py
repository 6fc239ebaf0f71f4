"""One process after the other: started anew, watched, given up. Real processes, a fake engine."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine_client.engine_harness import own_processes
from tests.engine_client.fake_engine_process import COMMAND, HANG

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import AddRequest
from quire.engine_client.process import supervisor as supervisor_module
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.process.link import EngineLink
from quire.engine_client.process.process_link import ProcessLink
from quire.engine_client.process.supervisor import Supervisor
from quire.engine_client.recovery import Death, EngineState, RecoveryConfig
from quire.errors import CheckpointError, EngineDeadError, QuireError
from quire.ipc import encode

pytestmark = pytest.mark.usefixtures("forked_engines")

WAIT_S = 60.0
OPEN_LINK = partial(ProcessLink, command=COMMAND)
QUICK = RecoveryConfig(first_backoff_s=0.01, heartbeat_timeout_s=20.0)


class Listener:
    """Keeps what is reported. explains: whether a death explains itself and the one before."""

    def __init__(self) -> None:
        self.links: list[EngineLink] = []
        self.messages: list[Any] = []
        self.deaths: list[Death] = []
        self.explains = False
        self.ends: list[QuireError] = []
        self._news = asyncio.Event()

    def on_ready(self, link: EngineLink) -> None:
        self.links.append(link)
        self._news.set()

    def on_message(self, link: EngineLink, message: Any) -> None:
        self.messages.append((link, message))

    def on_death(self, death: Death) -> frozenset[Death]:
        self.deaths.append(death)
        return frozenset(self.deaths[-2:] if self.explains else ())

    def on_end(self, error: QuireError) -> None:
        self.ends.append(error)
        self._news.set()

    async def end(self) -> QuireError:
        """Wait for the end of the last process, and return what clients are told of it."""
        while not self.ends:
            self._news.clear()
            await self._news.wait()
        return self.ends[0]

    async def ready(self, number: int) -> EngineLink:
        """Wait for the process of that number; the first is 0."""
        while len(self.links) <= number:
            self._news.clear()
            await self._news.wait()
        return self.links[number]


@contextlib.asynccontextmanager
async def kept(
    options: dict[str, Any] | None = None, recovery: RecoveryConfig = QUICK, **more: Any
) -> AsyncIterator[tuple[Supervisor, Listener]]:
    before = own_processes()  # of fixtures, in whatever order the tests run
    listener = Listener()
    supervisor = Supervisor(options or {}, OPEN_LINK, recovery, listener, **more)
    assert supervisor.state is EngineState.STARTING and supervisor.link is None
    await supervisor.start()
    try:
        yield supervisor, listener
    finally:
        await supervisor.shutdown(drain=False, timeout_s=2, reason=None)
        assert supervisor.state is EngineState.CLOSING and supervisor.pid is None
        assert own_processes() == before


async def failure(supervisor: Supervisor, listener: Listener) -> QuireError:
    """Wait until the supervisor has given up, and return why."""
    await listener.end()
    assert supervisor.failure is not None
    return supervisor.failure


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))  # type: ignore[arg-type]


def kill(supervisor: Supervisor) -> None:
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)


def crash(supervisor: Supervisor) -> None:
    """It ends as a process does that reads memory which isn't its own."""
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSEGV)


def test_a_process_that_dies_is_started_again_with_what_was_chosen() -> None:
    async def test() -> None:
        told: list[tuple[str, int, int]] = []
        options = {"num_progress": 1}
        async with kept(options, on_progress=lambda *news: told.append(news)) as (
            supervisor,
            listener,
        ):
            pid = supervisor.pid
            assert supervisor.state is EngineState.READY and supervisor.link is listener.links[0]
            assert supervisor.facts["kernels"] == "fake" and supervisor.silence_s >= 0
            kill(supervisor)
            await listener.ready(1)
            assert supervisor.state is EngineState.READY and supervisor.pid not in (pid, None)
            assert (supervisor.num_restarts, len(listener.deaths), listener.ends) == (1, 1, [])
            assert supervisor._options == options | {"max_model_len": 512}
            assert told == [("loading nothing", 1, 1)], "of the first process only"

    run(test)


class NoProcess(ProcessLink):
    """A link to a process that can't be started."""

    async def open(self, start_frame: bytes) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_it_sleeps_and_wakes_although_no_process_can_wait_for_the_wake_up() -> None:
    async def test() -> None:
        async with kept() as (supervisor, listener):
            supervisor._new_link = NoProcess
            await supervisor.sleep(keeps_process=True)
            assert (supervisor.state, supervisor.pid) == (EngineState.ASLEEP, None)
            supervisor._new_link = OPEN_LINK
            await supervisor.wake()
            assert supervisor.state is EngineState.READY and len(listener.links) == 2

    run(test)


def test_a_shutdown_while_it_falls_asleep_or_wakes_leaves_no_process() -> None:
    async def test(change: str, delay_s: float) -> None:
        async with kept() as (supervisor, _):
            if change == "wake":
                await supervisor.sleep(keeps_process=True)
                changing = asyncio.ensure_future(supervisor.wake())
            else:
                changing = asyncio.ensure_future(supervisor.sleep(keeps_process=True))
            await asyncio.sleep(delay_s)
            await supervisor.shutdown(drain=False, timeout_s=2, reason=None)
            await asyncio.gather(changing, return_exceptions=True)

    for change in ("sleep", "wake"):
        for delay_s in (0.0, 0.002, 0.01, 0.03):
            run(partial(test, change, delay_s))


def test_while_it_recovers_there_is_no_link() -> None:
    async def test() -> None:
        recovery = RecoveryConfig(first_backoff_s=20.0)
        async with kept(recovery=recovery) as (supervisor, listener):
            kill(supervisor)
            await listener.ready(1)
            kill(supervisor)
            while len(listener.deaths) < 2:
                await asyncio.sleep(0.005)
            assert supervisor.state is EngineState.RECOVERING
            assert (
                supervisor.link is None and supervisor.pid is None and supervisor.silence_s == 0.0
            )
        assert "shut down" in str(listener.ends[-1])  # in the middle of the wait

    run(test)


def test_a_hung_step_is_a_death_and_one_that_is_reported_again_changes_nothing() -> None:
    async def test() -> None:
        recovery = RecoveryConfig(heartbeat_timeout_s=1.0)
        async with kept(recovery=recovery) as (supervisor, listener):
            request = Request("a", [HANG, 2], DecodingParams(10))
            listener.links[0].send(encode(AddRequest(request)))
            await listener.ready(1)
            assert len(listener.messages) == 2 and supervisor.num_restarts == 1
            assert {link for link, _ in listener.messages} == {listener.links[0]}
            (death,) = listener.deaths
            assert death.has_hung and death.activity == (Doing.COMPUTING, {"a"})
            supervisor.on_death(listener.links[0], EngineDeadError("once more"), death)
            assert len(listener.deaths) == 1 and supervisor.state is EngineState.READY

    run(test)


def test_a_crash_loop_ends_with_a_reason_and_no_process() -> None:
    async def test() -> None:
        recovery = RecoveryConfig(max_restarts=2, first_backoff_s=0.01)
        async with kept(recovery=recovery) as (supervisor, listener):
            for number in range(3):
                await listener.ready(number)
                assert supervisor.failure is None and not listener.ends
                crash(supervisor)
            error = await failure(supervisor, listener)
            assert "died more than 2 times within 300 s and is not started again" in str(error)
            assert "SIGSEGV" in str(error), "the last reason"
            assert supervisor.state is EngineState.FAILED
            assert "SIGSEGV" not in str(listener.ends[0]), "clients need not know"
            assert (supervisor.pid, supervisor.num_restarts) == (None, 2)

    run(test)


def test_an_engine_that_others_kill_often_is_started_again_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        recovery = RecoveryConfig(max_restarts=1, first_backoff_s=0.01, cooldown_s=1.5)
        async with kept(recovery=recovery) as (supervisor, listener):
            for number in range(3):
                await listener.ready(number)
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGTERM)
            await listener.ready(3)
            assert supervisor.state is EngineState.READY and supervisor.num_restarts == 3
        assert caplog.text.count("the engine is started again in 1.5 s") == 2

    run(test)


def test_a_requested_restart_does_not_wait_for_a_pause_to_end() -> None:
    async def test() -> None:
        recovery = RecoveryConfig(first_backoff_s=25.0)
        async with kept(recovery=recovery) as (supervisor, listener):
            for number in range(2):
                await listener.ready(number)
                kill(supervisor)
            while len(listener.deaths) < 2:
                await asyncio.sleep(0.005)
            async with asyncio.timeout(15):
                await supervisor.renew()
            assert supervisor.state is EngineState.READY

    run(test)


def test_deaths_that_a_request_explains_are_no_crash_loop() -> None:
    async def test() -> None:
        recovery = RecoveryConfig(max_restarts=1, first_backoff_s=0.01)
        async with kept(recovery=recovery) as (supervisor, listener):
            for number in range(4):
                await listener.ready(number)
                listener.explains = number % 2 == 1
                crash(supervisor)
            await listener.ready(4)
            assert supervisor.state is EngineState.READY and supervisor.num_restarts == 4

    run(test)


def test_an_engine_that_can_not_be_built_again_fails_after_the_same_patience(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        recovery = RecoveryConfig(max_restarts=2, first_backoff_s=0.01)
        options = {"max_builds": 1, "build_marks": str(tmp_path)}
        async with kept(options, recovery) as (supervisor, listener):
            crash(supervisor)
            error = await failure(supervisor, listener)
            assert "the model is not there any more" in str(error)
            assert supervisor.num_restarts == 2

    run(test)


def test_restarted_engine_with_other_limits_is_refused() -> None:
    async def test() -> None:
        async with kept() as (supervisor, listener):
            assert supervisor.limits is not None
            supervisor.limits = type(supervisor.limits)(vocab_size=7, max_model_len=512)
            kill(supervisor)
            error = await failure(supervisor, listener)
            assert "has other limits than before" in str(error)
            assert len(listener.links) == 1 and len(listener.ends) == 1

    run(test)


def test_a_process_that_does_not_get_ready_again_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def test() -> None:
        async with kept(recovery=RecoveryConfig(max_restarts=1)) as (supervisor, listener):
            supervisor.build_limit_s = 0.3
            supervisor._options["hang_s"] = 600
            crash(supervisor)
            assert "not ready after 0.3 s" in str(await failure(supervisor, listener))

    run(test)
    assert supervisor_module.LEAST_BUILD_LIMIT_S >= 60, "loading a model takes its time"


def test_a_program_that_is_gone_fails_like_a_process_that_dies() -> None:
    async def test() -> None:
        async with kept(recovery=RecoveryConfig(max_restarts=1)) as (supervisor, listener):
            supervisor._new_link = partial(ProcessLink, command=("./no-such-program",))
            kill(supervisor)
            assert "can't be started" in str(await failure(supervisor, listener))

    run(test)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"fail": "no config.json"}, CheckpointError, r"no config\.json"),
        ({"crash": "oops"}, EngineDeadError, "ZeroDivisionError"),
    ],
)
def test_a_first_start_that_fails_is_not_repeated(
    options: dict[str, Any], kind: type[QuireError], reason: str
) -> None:
    async def test() -> None:
        before = own_processes()
        with pytest.raises(kind, match=reason):
            async with kept(options):
                raise AssertionError(f"{json.dumps(options)} started")
        assert own_processes() == before

    run(test)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_a_first_start_that_is_cancelled_leaves_no_process(delay_s: float) -> None:
    async def test() -> None:
        before = own_processes()
        supervisor = Supervisor({"hang_s": 600}, OPEN_LINK, QUICK, Listener())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.start(), delay_s)
        assert own_processes() == before

    run(test)


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_shutdown_in_the_middle_of_a_restart_leaves_no_process(delay_s: float) -> None:
    async def test() -> None:
        async with kept() as (supervisor, listener):
            supervisor._options["hang_s"] = 600
            kill(supervisor)
            while not listener.deaths:
                await asyncio.sleep(0.005)
            await asyncio.sleep(delay_s)

    run(test)


def test_a_start_that_is_cancelled_while_its_process_opens_leaves_nothing_behind() -> None:
    told: list[dict[str, Any]] = []

    class DiesOfIt:
        """A link whose process ends where its opening is cancelled, as `ProcessLink` ends it."""

        is_open = False
        pid = None

        def __init__(self, owner: Any, listener: Any) -> None:
            self.owner = owner

        async def open(self, start: bytes) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                error = EngineDeadError("it was not wanted any more")
                self.owner.on_death(self, error, Death(Activity(Doing.LOADING), status=None))

        async def close(self) -> None:
            pass

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        open_link: Any = DiesOfIt
        supervisor = Supervisor({}, open_link, QUICK, Listener())
        starting = asyncio.ensure_future(supervisor.start())
        await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        del supervisor, starting
        gc.collect()

    asyncio.run(test())
    gc.collect()
    assert told == []
