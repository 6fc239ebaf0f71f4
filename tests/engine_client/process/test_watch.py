"""When a process counts as hanging: by its answers, its progress, and the predicted time of its
step."""

import asyncio
from collections.abc import Callable

import pytest
from tests.engine_client.fake_engine_process import HANG
from tests.engine_client.process.test_link import Owner, add, opened, run
from tests.virtual_loop import run_virtually

from quire.engine_client import recovery
from quire.engine_client.messages import Outputs
from quire.engine_client.process import link as link_module
from quire.engine_client.process.activity import ActivityRecord, Doing, Pace
from quire.engine_client.process.link import EngineLink
from quire.engine_client.recovery import Death, step_limit_s
from quire.errors import QuireError

pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float, float], None]:
    """Sets the constants of `step_limit_s`."""

    def set_limits(least_s: float, ratio: float, unknown_s: float) -> None:
        monkeypatch.setattr(recovery, "LEAST_STEP_LIMIT_S", least_s)
        monkeypatch.setattr(link_module, "LEAST_STEP_LIMIT_S", least_s)
        monkeypatch.setattr(recovery, "STEP_LIMIT_RATIO", ratio)
        monkeypatch.setattr(recovery, "UNKNOWN_STEP_LIMIT_S", unknown_s)

    return set_limits


def test_the_limit_grows_with_the_predicted_time() -> None:
    assert step_limit_s(0.0) == 60.0, "nothing is predicted"
    assert [step_limit_s(seconds) for seconds in (0.01, 1.0, 10.0)] == [30.2, 50.0, 230.0]


def test_a_hanging_step_ends_after_a_time_that_follows_from_its_prediction(
    limits: Callable[[float, float, float], None],
) -> None:
    limits(0.9, 2.0, 60.0)

    async def test() -> None:
        async with opened({"predicted_s": 0.05}) as (link, owner):
            await owner.ready
            link.watch(None)
            link.send(add(HANG, 3))
            error = await owner.death
            assert "its step had not ended after 1 s, so it was killed" in str(error)
            assert owner.evidence.has_hung
            assert owner.evidence.activity == (Doing.COMPUTING, {"a"})
            assert sum(isinstance(message, Outputs) for message in owner.messages) == 3

    run(test)


def test_a_step_that_was_predicted_to_be_long_is_left_alone(
    limits: Callable[[float, float, float], None],
) -> None:
    limits(0.1, 20.0, 0.2)

    async def test() -> None:
        async with opened({"predicted_s": 0.25, "step_s": 0.5}) as (link, owner):
            await owner.ready
            link.watch(None)
            link.send(add(10, max_tokens=2))
            while sum(isinstance(message, Outputs) for message in owner.messages) < 2:
                await asyncio.sleep(0.01)
            assert not owner.death.done()

    run(test)


class SilentLink(EngineLink):
    """A link to a process that answers no ping, and may make progress."""

    pid = None

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner, owner)
        self.pace = Pace(1, 0.0)
        self._read_pace = lambda: self.pace
        self.killed = asyncio.Event()

    async def open(self, start_frame: bytes) -> None:
        raise NotImplementedError

    def kill(self, why: str) -> None:
        self._killed_because = why
        self.killed.set()
        assert self._pulse is not None
        self._pulse.cancel()

    async def _await_exit(self) -> tuple[QuireError, Death]:
        raise NotImplementedError


def test_a_process_that_makes_progress_may_answer_late() -> None:
    """As when a ping waits behind hundreds of requests, some of which are added in each step."""

    async def test() -> None:
        link = SilentLink(Owner())
        link.watch(0.2)
        for count in range(30):
            link.pace = Pace(count, 0.0)
            await asyncio.sleep(0.02)
        assert not link.killed.is_set(), "it was silent for three times the limit"
        await link.killed.wait()
        assert link._killed_because is not None and "after 0.2 s" in link._killed_because

    run_virtually(test())


def test_the_pace_counts_records_and_keeps_the_prediction_until_the_process_idles() -> None:
    record = ActivityRecord()
    assert record.pace() == (0, 0.0)
    record.compute(["a"], 1.5)
    record.plan()
    record.record_request("b")
    assert record.pace() == (3, 1.5), "the step may still be running"
    record.idle()
    assert record.pace() == (4, 0.0)
    record.compute(None, 0.5)
    assert record.pace() == (5, 0.5)
