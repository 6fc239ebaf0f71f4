"""The real engine on a virtual clock: arrivals come in time, steps take what the costs say."""

from collections.abc import Iterator
from itertools import count

import pytest

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, StepPlan
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import (
    CountingRunner,
    DeviceTime,
    EngineShape,
    VirtualClock,
    VirtualEngine,
)

SHAPE = EngineShape(
    groups=(KVGroup((0,), KVKind.FULL, 64),),
    num_blocks=64,
    block_size=16,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


class OneSecond:
    """A step takes a second, and a sequence's end a tenth of one."""

    def step_s(self, work: PlannedWork) -> float:
        return 1.0

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        return 0.1 * num_ended


def asked(name: str, **params: object) -> Request:
    return Request(name, list(range(20)), DecodingParams(**params))  # type: ignore[arg-type]


def test_a_device_runs_its_steps_one_after_another() -> None:
    clock = VirtualClock()
    device = DeviceTime(clock)
    device.launch(2.0)
    device.launch(3.0)
    device.wait()
    device.land()
    assert clock() == 2.0
    clock.wait_until(4.0)
    device.launch(1.0)
    device.reset()
    assert clock() == 6.0, "the second step ends at 5 s, the third a second later"
    clock.wait_until(1.0)
    assert clock() == 6.0


def test_arrivals_come_in_time_and_may_bring_others() -> None:
    engine: VirtualEngine[str] = VirtualEngine(SHAPE, OneSecond())
    came: list[tuple[str, float]] = []
    ended: list[tuple[str, float]] = []

    def arrive(name: str) -> None:
        came.append((name, engine.clock.now_s))
        engine.add(asked(name, max_tokens=2))

    def receive(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.LENGTH:
                ended.append((output.request_id, engine.clock.now_s))
                if output.request_id == "first":
                    engine.expect(10.0, "third")

    engine.expect(0.5, "second")
    engine.expect(0.0, "first")
    engine.run(arrive, receive)
    assert came == [("first", 0.0), ("second", 1.0), ("third", 10.0)]
    assert [name for name, _ in ended] == ["first", "second", "third"]
    assert [at_s for _, at_s in ended] == pytest.approx([2.1, 3.2, 12.1])
    assert not engine.engine.has_work()


def test_a_run_ends_at_its_time() -> None:
    engine: VirtualEngine[str] = VirtualEngine(SHAPE, OneSecond())
    engine.expect(0.0, "long")
    engine.run(lambda name: engine.add(asked(name, max_tokens=100)), lambda outputs: None, 5.0)
    assert engine.clock.now_s == 5.0 and engine.engine.has_work()


@pytest.mark.parametrize("width", [2, 4])
def test_beams_have_candidates_in_order(width: int) -> None:
    def run_plan(tokens: Iterator[int]) -> tuple[float, ...]:
        runner = CountingRunner(16, VirtualClock(), lambda work: 1.0, tokens)
        params = DecodingParams(9, beam_width=width)
        admission = RowAdmission(3, [1] * 5, 5, 0, ((7,),), params)
        runner.execute(StepPlan(0, 1, 5, admit=(admission,), chunks=(Chunk(3, 5),)))
        result = runner.result()
        ((entry,),) = result.logprobs.values()
        assert list(result.rows) == [3] and result.token_ids[0] == (entry.token_id,)
        assert len(set(entry.top_token_ids)) == width
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        return entry.top_logprobs

    assert run_plan(count(40)) == run_plan(count(50))
