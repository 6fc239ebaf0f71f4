"""Which requests and seconds are reported of a step, against what the scheduler has put there."""

import random
from collections.abc import Collection

import pytest

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.cost_model import StepLoad, typical_model
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import LearningPacer
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.simulation.baselines import NoGrowth
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import FakeRunner

GROUPS = (KVGroup((0,), KVKind.FULL, 64),)
NUM_BLOCKS = 24


class Watched:
    """An engine that checks, when a step is run, which requests are said to be in it."""

    def __init__(self, *, overlap: bool) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(6, 24),
            KVCacheManager(KVCacheConfig(GROUPS, NUM_BLOCKS, 8, True, b"secret")),
            lengths=NoGrowth(),
        )
        self.scheduler.pacer = pacer = LearningPacer()
        pacer.model = self.model = typical_model(StepLoad(1, 1), 0.01)
        self.last_step_s = 0.0
        self.overlap = overlap
        self.reported: set[str] = set()
        self.num_reported = self.num_steps = 0
        world = self

        class Runner(FakeRunner):
            def execute(self, plan: StepPlan) -> None:
                world.check()
                super().execute(plan)

        model = FakeModel(vocab_size=1000)
        runner = Runner(GROUPS, NUM_BLOCKS, 8, max_num_rows=6, max_num_tokens=200, model=model)
        limits = ModelLimits(vocab_size=1000, max_model_len=100)
        self.engine = Engine(self.scheduler, runner, limits, clock=lambda: 0.0, overlap=overlap)
        self.engine.on_step = self.on_step

    def on_step(self, request_ids: Collection[str] | None, predicted_s: float) -> None:
        self.predicted_s = predicted_s
        if request_ids is not None:
            self.reported = set(request_ids)
            self.num_reported += 1

    def check(self) -> None:
        self.num_steps += 1
        step_s, others_s = self.model.predict_s(self.scheduler.budget.load), 0.0
        if self.overlap and len(self.engine._in_flight):
            others_s = self.last_step_s
        assert self.predicted_s == others_s + step_s > 0
        self.last_step_s = step_s
        steps = self.scheduler._in_flight
        in_flight = {sequence.request_id for step in steps for sequence in step.sequences}
        assert self.reported >= in_flight if self.overlap else self.reported == in_flight


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_record_names_all_requests_of_steps_in_flight(seed: int, overlap: bool) -> None:
    """Long prompts in chunks, branches, preemptions, aborts."""
    rng = random.Random(seed)
    world = Watched(overlap=overlap)
    engine = world.engine
    names = iter(range(30))
    for _ in range(3000):
        if rng.random() < 0.5 and (number := next(names, None)) is not None:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            params = DecodingParams(max_tokens=rng.randint(1, 40), seed=number)
            engine.add(Request(f"r{number}", prompt, params, n=rng.randint(1, 3)))
        if rng.random() < 0.01:
            engine.abort(f"r{rng.randrange(30)}")
        if engine.has_work():
            engine.step()
    assert not engine.has_work() and world.num_steps > 100
    assert engine.stats().num_preemptions > 0


def test_steps_in_which_all_rows_decode_are_told_without_a_look() -> None:
    world = Watched(overlap=False)
    world.engine.add(Request("a", [1, 2, 3], DecodingParams(max_tokens=60, seed=1)))
    while world.engine.has_work():
        world.engine.step()
    assert world.num_steps > 10 and world.num_reported <= 5
