"""Steps on a thread of their own: the same results, failures where they are asked for."""

import threading
import time
from pathlib import Path
from statistics import median

import pytest
from tests.engine.test_engine import GROUPS, LIMITS, MODEL, request, run, tokens

from quire.assembly.build import build_engine
from quire.bench.trace_summary import summarize_trace
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import RowAdmission, StepPlan, StepResult, TokenMasks
from quire.engine.background_runner import BackgroundRunner
from quire.engine.engine import Engine
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.observability.step_trace import StepTiming, StepTrace, read_step_trace
from quire.simulation.fakes.fake_runner import FakeRunner, Faults


def make_engine(faults: Faults | None = None) -> Engine:
    memory = KVCacheManager(KVCacheConfig(GROUPS, 40, 8, True, b"secret"))
    fake = FakeRunner(GROUPS, 40, 8, max_num_rows=8, max_num_tokens=100, model=MODEL, faults=faults)
    runner = BackgroundRunner(fake, StepTiming())
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    return Engine(
        scheduler, runner, LIMITS, timing=runner.timing, clock=time.monotonic, overlap=True
    )


def check_answers(engine: Engine) -> None:
    asked = [request("a", n=3), request("b", 30, 40, start=200), request("c", 1, 1)]
    for each in asked:
        engine.add(each)
    found = run(engine)
    for each in asked:
        for branch in range(each.n):
            expected = MODEL.expected_output(each, branch, LIMITS.max_model_len)
            assert tokens(found[each.request_id, branch]) == list(expected.token_ids)


def test_every_request_gets_its_tokens() -> None:
    check_answers(make_engine())


@pytest.mark.parametrize(
    "faults",
    [
        Faults(sample_fails_at=frozenset({1})),
        Faults(execute_fails_at=frozenset({2})),
    ],
)
def test_a_failed_step_and_those_behind_it_are_computed_again(faults: Faults) -> None:
    engine = make_engine(faults)
    check_answers(engine)
    assert engine.stats().num_failed_steps == 1


class Runner:
    """Notes what it was asked for; a step waits until it is let go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.done: list[object] = []
        self.failure: BaseException | None = None
        self.timing = StepTiming()

    def execute(self, plan: StepPlan) -> None:
        self.may_go.wait(10)
        self.done.append([list(each.token_ids) for each in plan.admit])
        self.timing.build_s, self.timing.forward_s = 4.0, 2.0
        if self.failure is not None:
            raise self.failure

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.done.append(masks)
        self.timing.sample_s = 1.0

    def result(self) -> StepResult:
        return StepResult(len(self.done), (), ())

    def reset(self) -> None:
        self.done.append("reset")


def test_a_call_waits_for_nothing_and_what_was_lent_is_copied() -> None:
    inner = Runner()
    runner = BackgroundRunner(inner, inner.timing)
    lent = [1, 2, 3]
    admission = RowAdmission(0, lent, 3, 0, ((0,),), DecodingParams(max_tokens=2))
    runner.execute(StepPlan(0, 1, 3, admit=(admission,)))
    runner.sample({0: [b"x"]})
    lent.append(4)
    assert inner.done == []
    inner.may_go.set()
    assert runner.result().step_id == 2
    assert inner.done == [[[1, 2, 3]], {0: [b"x"]}]
    assert (runner.timing.device_s, runner.timing.build_s) == (3.0, 4.0)


class TimedRunner(FakeRunner):
    """Says that a forward pass took a second a token."""

    timing = StepTiming()

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        self.timing.forward_s = float(plan.num_tokens)


def test_a_step_s_record_has_its_own_times(tmp_path: Path) -> None:
    memory = KVCacheManager(KVCacheConfig(GROUPS, 40, 8, True, b"secret"))
    fake = TimedRunner(GROUPS, 40, 8, max_num_rows=8, max_num_tokens=100, model=MODEL)
    runner = BackgroundRunner(fake, fake.timing)
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    engine = Engine(scheduler, runner, LIMITS, timing=runner.timing, overlap=True)
    engine.add(request("a", 80, 12))
    with StepTrace(tmp_path / "trace") as trace:
        engine.trace = trace
        run(engine)
    records = list(read_step_trace(tmp_path / "trace"))
    assert [each.forward_s for each in records] == [each.num_tokens for each in records]
    assert records[0].num_tokens == 64
    times = summarize_trace(tmp_path / "trace")["all steps"]
    assert times.step_us == pytest.approx(1e6 * median(each.elapsed_s for each in records))


def test_a_result_is_kept_back_until_the_next_step_has_begun() -> None:
    inner = Runner()
    runner = BackgroundRunner(inner, inner.timing)
    inner.may_go.set()
    runner.execute(StepPlan(0, 0, 0))
    runner.sample()
    runner.result()  # none is behind it
    inner.may_go.clear()
    threading.Timer(0.05, lambda: [inner.may_go.set(), runner.on_forward()]).start()
    for step_id in (1, 2):
        runner.execute(StepPlan(step_id, 0, 0))
        runner.sample()
    runner.result()
    assert len(inner.done) >= 5, "the second has not begun"
    runner.result()


def test_nothing_runs_after_a_failure_or_beyond_a_reset() -> None:
    inner = Runner()
    runner = BackgroundRunner(inner, inner.timing)
    inner.failure = RuntimeError("no memory")
    for step_id in range(2):
        runner.execute(StepPlan(step_id, 0, 0))
        runner.sample()
    inner.may_go.set()
    with pytest.raises(RuntimeError, match="no memory"):
        runner.result()
    runner.reset()
    assert inner.done == [[], "reset"]
    inner.failure = None
    runner.execute(StepPlan(2, 0, 0))
    runner.sample()
    assert runner.result().step_id == 4


def test_steps_under_way_are_waited_for_by_a_reset() -> None:
    """As after Ctrl-C: the one that runs ends, the ones behind it do not begin."""
    inner = Runner()
    runner = BackgroundRunner(inner, inner.timing)
    for step_id in range(2):
        runner.execute(StepPlan(step_id, 0, 0))
        runner.sample()
    threading.Timer(0.05, inner.may_go.set).start()
    runner.reset()
    assert inner.done in ([[], "reset"], ["reset"])


def test_async_scheduling_on_the_cpu_uses_a_background_runner(tmp_path) -> None:
    given = {"model": str(EMBEDDED_MODEL), "max_model_len": 64, "skip_tokenizer_init": True}
    plain = build_engine(given)
    assert not plain.overlap and not isinstance(plain._runner, BackgroundRunner)
    engine = build_engine(given | {"async_scheduling": True})
    assert engine.overlap and isinstance(engine._runner, BackgroundRunner)
    for each in (plain, engine):
        each.add(request("a", 20, 30))
    found = [tokens(run(each)["a", 0]) for each in (plain, engine)]
    assert found[0] == found[1] and len(found[0]) == 30
    assert engine.stats().utilization["busy_s"] > 0
    for more in ({"enable_lora": True, "max_lora_rank": 8}, {"cache_dir": str(tmp_path)}):
        other = build_engine(given | {"async_scheduling": True} | more)
        assert not other.overlap and not isinstance(other._runner, BackgroundRunner)
        other.tier_work.close()
