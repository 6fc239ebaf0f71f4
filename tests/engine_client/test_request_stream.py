"""Outputs on their way out: pulled or pushed, to the end, to an error, or given up."""

import asyncio
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.recovery import OpenRequest
from quire.engine_client.request_stream import RequestStream
from quire.errors import EngineDeadError, QuireError

STOP = FinishReason.STOP


class Owner:
    """Aborts as the dispatcher does, and remembers what."""

    def __init__(self, *sizes: int) -> None:
        self.open = {
            f"r{index}": OpenRequest(Request(f"r{index}", [1], DecodingParams(9), n=n), 0.0)
            for index, n in enumerate(sizes)
        }
        self.stream = RequestStream(self, self.open.values())
        self.aborted: list[tuple[str, int | None]] = []

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        if self.open[request_id].drop(branch_index):
            self.aborted.append((request_id, branch_index))
            self.stream.settle(request_id)

    def bring(
        self, request: int = 0, branch: int = 0, token: int = 7, end: FinishReason | None = None
    ) -> None:
        output = SequenceOutput(f"r{request}", branch, (token,), finish_reason=end)
        if self.open[output.request_id].take(output):
            self.stream.push(output)


class Sink:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_output(self, output: SequenceOutput) -> None:
        self.told.append(output.token_ids[0])

    def on_end(self, error: QuireError | None) -> None:
        self.told.append(error)


async def pull(stream: RequestStream) -> list[int]:
    return [output.token_ids[0] async for output in stream]


def test_outputs_are_pulled_until_every_branch_has_ended() -> None:
    owner = Owner(2, 1)
    assert owner.stream.num_open == 3 and owner.stream.open_request_ids == {"r0", "r1"}
    owner.bring(0, 0, 1)
    owner.bring(0, 0, 2, STOP)
    owner.bring(0, 1, 3, STOP)
    assert owner.stream.open_request_ids == {"r1"}
    owner.bring(1, 0, 4, STOP)
    assert asyncio.run(pull(owner.stream)) == [1, 2, 3, 4]
    assert owner.stream.num_open == 0


def test_a_reader_waits_for_what_comes() -> None:
    async def read() -> list[int]:
        owner = Owner(1)
        reader = asyncio.ensure_future(pull(owner.stream))
        for token in (1, 2, 3):
            await asyncio.sleep(0)
            owner.bring(0, 0, token, STOP if token == 3 else None)
        return await reader

    assert asyncio.run(read()) == [1, 2, 3]


def test_an_error_comes_after_the_outputs_that_had_come() -> None:
    owner = Owner(1, 1)
    owner.bring(0, 0, 1)
    owner.stream.fail(EngineDeadError("gone"))
    owner.bring(1, 0, 2)

    async def read() -> list[int]:
        found = [(await anext(owner.stream)).token_ids[0]]
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(owner.stream)
        return found

    assert asyncio.run(read()) == [1]


def test_what_is_aborted_ends_the_stream_without_an_output() -> None:
    owner = Owner(2)
    owner.stream.abort_branch("r0", 1)
    owner.stream.abort_branch("r0", 1)
    owner.stream.abort_branch("unheard-of", 0)
    assert owner.aborted == [("r0", 1)] and owner.stream.num_open == 1
    owner.stream.close()
    owner.stream.close()
    assert owner.aborted == [("r0", 1), ("r0", None)]
    assert asyncio.run(pull(owner.stream)) == []


def test_closing_drops_what_nobody_has_read() -> None:
    owner = Owner(1)
    owner.bring()
    owner.stream.close()
    assert asyncio.run(pull(owner.stream)) == []


def test_everything_is_pushed_to_a_sink_and_the_end_once() -> None:
    owner, sink = Owner(2), Sink()
    owner.stream.attach(sink)
    owner.bring(0, 0, 1)
    owner.bring(0, 1, 2, STOP)
    owner.bring(0, 0, 3, STOP)
    owner.stream.close()
    owner.stream.fail(EngineDeadError("late"))
    assert sink.told == [1, 2, 3, None]


def test_a_sink_is_told_of_an_error_and_of_nothing_after_it() -> None:
    owner, sink = Owner(1, 1), Sink()
    owner.stream.attach(sink)
    error = EngineDeadError("gone")
    owner.stream.fail(error)
    owner.bring(1, 0, 5)
    owner.stream.close()
    assert sink.told == [error]
    assert owner.aborted == [("r0", None), ("r1", None)]


def test_a_sink_is_told_of_the_end_when_the_rest_is_aborted() -> None:
    owner, sink = Owner(2), Sink()
    owner.stream.attach(sink)
    owner.bring(0, 0, 1, STOP)
    owner.stream.abort_branch("r0", 1)
    assert sink.told == [1, None]


@pytest.mark.parametrize("closes", [True, False])
def test_a_sink_may_end_a_branch_or_all_from_within(closes: bool) -> None:
    owner = Owner(2 if closes else 1)

    class Ender(Sink):
        def on_output(self, output: SequenceOutput) -> None:
            super().on_output(output)
            if closes:
                owner.stream.close()
            else:
                owner.stream.abort_branch("r0", 0)

    sink = Ender()
    owner.stream.attach(sink)
    owner.bring(0, 0, 1)
    owner.bring(0, 0, 2)
    assert sink.told == [1, None]
    assert owner.aborted == [("r0", None if closes else 0)]
