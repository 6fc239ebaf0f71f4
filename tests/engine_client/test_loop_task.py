"""A task that watches a fleet ends when it is told to, and not silently otherwise."""

import asyncio

import pytest

from quire.engine_client.loop_task import LoopTask


class Watch(LoopTask):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.num_looks = 0

    async def _run(self) -> None:
        while True:
            self.num_looks += 1
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0)


def test_it_goes_on_until_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        watch = Watch()
        await watch.stop()
        watch.start()
        while watch.num_looks < 2:
            await asyncio.sleep(0)
        await watch.stop()
        num_looks = watch.num_looks
        await watch.stop()
        await asyncio.sleep(0.01)
        assert watch.num_looks == num_looks

    asyncio.run(test())
    assert caplog.messages == []


def test_a_failure_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        watch = Watch(KeyError("a bug"))
        watch.start()
        await asyncio.sleep(0.01)
        await watch.stop()

    asyncio.run(test())
    (record,) = caplog.records
    assert "runs no more" in record.message and record.exc_info is not None
