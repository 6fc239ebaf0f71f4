"""What is sent to a process and when, and where its outputs go; without any process."""

import asyncio
import signal
from typing import Any

import pytest
from tests.engine_client.engine_harness import Pulled, pull
from tests.engine_client.failover.one_engine_world import FakeWire
from tests.engine_client.fleet_world import LIMITS

from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    ClearPrefixes,
    Outputs,
    RequestFailed,
    SetPaused,
)
from quire.engine_client.one_engine import OnlyPlacement
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death
from quire.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QuireError,
    RequestKillsEngineError,
)


class Sink:
    """Writes down the tokens that are pushed into it, and the end."""

    def __init__(self) -> None:
        self.pushed: list[Any] = []

    def on_output(self, output: SequenceOutput) -> None:
        self.pushed.append(output.token_ids[0])

    def on_end(self, error: QuireError | None) -> None:
        self.pushed.append(error)


class World:
    """A dispatcher on a clock of its own."""

    def __init__(self, max_num_open: int = 100) -> None:
        self.now_s = 0.0
        self.dispatcher = FleetDispatcher(max_num_open, lambda: self.now_s, OnlyPlacement())
        self.wire = FakeWire()

    def open(self, *names: str, n: int = 1, sink: Any = None, **more: Any) -> Any:
        """Requests whose outputs are pulled; with a sink of the test's own, their stream."""
        requests = [Request(name, [1], DecodingParams(99), n=n, **more) for name in names]
        if sink is not None:
            return self.dispatcher.open(requests, sink)
        return pull(self.dispatcher, *requests)

    def start_process(self) -> FakeWire:
        self.wire = FakeWire()
        self.dispatcher.on_ready("", self.wire, LIMITS, {})
        return self.wire

    def die(self) -> frozenset[Death]:
        """The process crashes in a step of all that it knows of; what that explains."""
        death = Death(Activity(Doing.COMPUTING, None), -int(signal.SIGSEGV))
        return self.dispatcher.on_death("", death)

    def bring(
        self, *names: str, end: FinishReason | None = None, branch: int = 0, token: int = 7
    ) -> None:
        """A step that brings one token for each."""
        outputs = [SequenceOutput(name, branch, (token,), finish_reason=end) for name in names]
        self.dispatcher.on_message("", self.wire, Outputs(outputs))


def drain(stream: Pulled) -> list[SequenceOutput]:
    """All outputs of a stream that has ended."""

    async def read() -> list[SequenceOutput]:
        return [output async for output in stream]

    return asyncio.run(read())


def test_requests_are_sent_at_once_and_their_outputs_go_to_their_streams() -> None:
    world = World()
    wire = world.start_process()
    one, other = world.open("a", "b"), world.open("c", n=2)
    assert wire.added() == ["a", "b", "c"] and world.dispatcher.num_open == 4
    world.bring("a", "c")
    world.bring("a", "b", "c", "unheard-of", end=FinishReason.STOP)
    assert world.dispatcher.num_open == 1
    assert [(output.request_id, output.branch_index) for output in drain(one)] == [
        ("a", 0),
        ("a", 0),
        ("b", 0),
    ]
    world.bring("c", end=FinishReason.STOP, branch=1)
    assert world.dispatcher.num_open == 0 and len(drain(other)) == 3


def test_each_new_process_is_told_of_a_pause() -> None:
    world = World()
    world.dispatcher.send_control(SetPaused(True))
    world.dispatcher.send_control(ClearPrefixes())  # there is nothing to forget yet
    wire = world.start_process()
    world.open("a")
    assert [type(message) for message in wire.sent] == [SetPaused, AddRequest]
    world.die()
    assert [type(message) for message in world.start_process().sent] == [SetPaused, AddRequest]
    world.bring("a")
    world.bring("a")
    world.dispatcher.send_control(SetPaused(False))
    world.dispatcher.send_control(ClearPrefixes())
    assert world.wire.sent[-2:] == [SetPaused(False), ClearPrefixes()]
    world.die()
    assert [type(message) for message in world.start_process().sent] == [AddRequest]


def test_requests_that_come_before_a_process_wait_for_it() -> None:
    world = World()
    world.open("a")
    world.open("b")
    assert world.start_process().added() == ["a", "b"]


def test_a_full_queue_is_told_without_how_many_are_open() -> None:
    told = set()
    for num_open in (2, 3, 4):
        world = World(max_num_open=4)
        world.open("a", n=num_open)
        with pytest.raises(OverloadedError) as caught:
            world.open("b", n=3)
        told.add((str(caught.value), caught.value.retry_after_s))
    assert len(told) == 1


def test_too_many_and_those_of_one_name_are_refused_and_nothing_is_kept() -> None:
    world = World(max_num_open=4)
    wire = world.start_process()
    world.open("a", n=2)
    with pytest.raises(OverloadedError, match="too many generations open to take 3 more"):
        world.open("b", n=3)
    with pytest.raises(InvalidRequestError, match="5 generations at once"):
        world.open("b", n=5)
    for names in (("a",), ("b", "b")):
        with pytest.raises(InvalidRequestError, match="unique"):
            world.open(*names)
    with pytest.raises(InvalidRequestError, match="AddRequest can't be sent"):
        pull(world.dispatcher, Request("b", [2**70], DecodingParams(1)))
    assert wire.added() == ["a"] and world.dispatcher.num_open == 2


def test_an_abort_is_sent_once_and_only_for_what_is_open() -> None:
    world = World()
    wire = world.start_process()
    stream = world.open("a", n=3)
    stream.abort_branch("a", 1)
    stream.abort_branch("a", 1)
    world.dispatcher.abort("unheard-of")
    world.bring("a", end=FinishReason.STOP)
    stream.abort_branch("a", 0)
    stream.close()
    stream.close()
    assert wire.sent[1:] == [AbortRequest("a", 1), AbortRequest("a", None)]
    assert world.dispatcher.num_open == 0
    world.bring("a", branch=2)
    assert drain(stream) == []


def test_a_refusal_is_raised_by_its_stream_alone() -> None:
    world = World()
    world.start_process()
    bad, good = world.open("bad"), world.open("good")
    failed = RequestFailed("bad", "context_length_exceeded", "too long", 400, "prompt")
    world.dispatcher.on_message("", world.wire, failed)
    world.dispatcher.on_message("", world.wire, failed)
    with pytest.raises(PromptTooLongError, match="too long"):
        drain(bad)
    world.bring("good", end=FinishReason.STOP)
    assert len(drain(good)) == 1 and world.dispatcher.num_open == 0


def test_after_a_death_a_request_goes_on_from_its_tokens_with_the_time_that_is_left() -> None:
    world = World()
    world.start_process()
    stream = world.open("a", n=2, deadline_s=5.0)
    world.bring("a")
    world.bring("a", end=FinishReason.STOP, branch=1)
    assert world.die() == frozenset()
    world.now_s = 2.0
    (added,) = world.start_process().sent
    assert isinstance(added, AddRequest)
    assert added.request.resumed == (ResumedBranch(0, (7,)),)
    assert added.request.deadline_s == 3.0
    world.bring("a", end=FinishReason.LENGTH)
    assert len(drain(stream)) == 3, "nothing is missing and nothing comes twice"


def test_suspects_are_tried_in_turn_and_newcomers_wait_behind_them() -> None:
    world = World()
    world.start_process()
    world.open("a")
    world.open("b")
    world.die()
    world.open("new")
    wire = world.start_process()
    assert wire.added() == ["a"]
    world.bring("a")
    assert wire.added() == []
    world.bring("a")
    assert wire.added() == ["b"]
    world.open("newer")
    world.bring("a", "b", end=FinishReason.STOP)
    assert wire.added() == ["new", "newer"]
    world.open("newest")
    assert wire.added() == ["newest"]


def test_the_one_on_trial_is_ended_alone() -> None:
    world = World()
    world.start_process()
    killer, other = world.open("killer"), world.open("other")
    world.die()
    world.start_process()
    assert len(world.die()) == 2
    with pytest.raises(RequestKillsEngineError, match="died repeatedly"):
        drain(killer)
    assert world.start_process().added() == ["other"]
    world.bring("other", end=FinishReason.STOP)
    assert len(drain(other)) == 1 and world.dispatcher.num_open == 0


def test_a_client_that_leaves_on_trial_causes_no_blame() -> None:
    world = World()
    world.start_process()
    killer = world.open("killer")
    world.open("other")
    world.die()
    wire = world.start_process()
    assert wire.added() == ["killer"]
    killer.close()
    assert wire.added() == [], "the process may be in the very step that kills it"
    assert len(world.die()) == 2
    assert world.start_process().added() == ["other"]


def test_a_client_that_leaves_on_trial_makes_room_when_the_process_knows() -> None:
    world = World()
    world.start_process()
    first = world.open("first")
    world.open("second")
    world.die()
    wire = world.start_process()
    wire.sent.clear()
    first.close()
    assert wire.sent == [AbortRequest("first", None)]
    wire.between_steps()
    assert wire.added() == ["second"]


def test_the_end_is_told_to_everybody_once() -> None:
    world = World()
    world.start_process()
    streams = [world.open("a", "b"), world.open("c")]
    world.dispatcher.on_end(EngineDeadError("over"))
    world.dispatcher.on_end(EngineDeadError("over again"))
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"^over$"):
            drain(stream)
        stream.close()
    assert world.dispatcher.num_open == 0


def test_messages_from_a_dead_process_are_dropped() -> None:
    world = World()
    old = world.start_process()
    stream = world.open("a")
    failed = RequestFailed("a", "context_length_exceeded", "too long", 400, "prompt")
    late = Outputs([SequenceOutput("a", 0, (6,), finish_reason=FinishReason.STOP)])
    world.die()
    for message in (late, failed):
        world.dispatcher.on_message("", old, message)
    wire = world.start_process()
    for message in (late, failed):
        world.dispatcher.on_message("", old, message)
    assert wire.added() == ["a"] and world.dispatcher.num_open == 1
    world.bring("a", end=FinishReason.STOP)
    assert [output.token_ids for output in drain(stream)] == [(7,)]


def test_everything_is_pushed_in_order_and_the_end_once() -> None:
    world, sink = World(), Sink()
    world.start_process()
    stream = world.open("a", n=2, sink=sink)
    world.bring("a", token=1)
    world.bring("a", branch=1, token=2, end=FinishReason.STOP)
    world.bring("a", token=3, end=FinishReason.STOP)
    stream.close()
    world.dispatcher.on_end(EngineDeadError("late"))
    assert sink.pushed == [1, 2, 3, None]


def test_after_an_error_nothing_is_pushed_and_closing_aborts_the_rest() -> None:
    world, sink = World(), Sink()
    wire = world.start_process()
    stream = world.open("a", "b", sink=sink)
    world.dispatcher.on_message("", wire, RequestFailed("a", "internal_error", "gone", 500))
    world.bring("b", token=5)
    assert world.dispatcher.num_open == 1
    stream.close()
    assert [str(error) for error in sink.pushed] == ["gone"]
    assert wire.sent[2:] == [AbortRequest("b", None)] and world.dispatcher.num_open == 0


def test_the_end_comes_when_the_rest_is_aborted() -> None:
    world, sink = World(), Sink()
    world.start_process()
    stream = world.open("a", n=2, sink=sink)
    world.bring("a", token=1, end=FinishReason.STOP)
    stream.abort_branch("a", 1)
    stream.abort_branch("unheard-of", 0)
    assert sink.pushed == [1, None]


@pytest.mark.parametrize("closes", [True, False])
def test_a_sink_may_end_a_branch_or_all_from_within(closes: bool) -> None:
    class Ender(Sink):
        def on_output(self, output: SequenceOutput) -> None:
            super().on_output(output)
            if closes:
                stream.close()
            else:
                stream.abort_branch("a", 0)

    world, sink = World(), Ender()
    wire = world.start_process()
    stream = world.open("a", n=2 if closes else 1, sink=sink)
    world.bring("a", token=1)
    world.bring("a", token=2)
    assert sink.pushed == [1, None]
    assert wire.sent[1:] == [AbortRequest("a", None if closes else 0)]
