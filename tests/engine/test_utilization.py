"""Busy, gaps and idle time: they add up, on any sequence of events and on virtual devices."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_engine import GROUPS, LIMITS, MODEL, request

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult, TokenMasks
from quire.engine.engine import Engine
from quire.engine.step_work import MachineRates, StepWork
from quire.engine.utilization import WINDOW_S, Utilization, in_short
from quire.observability.step_trace import StepTiming, StepTrace
from quire.simulation.fakes.fake_runner import FakeRunner, Faults

LOAD = StepLoad(4, 400)
WORK = StepWork(1000, 0, 0, 0, 10, 0)
RATES = MachineRates(bytes_per_s=1e4, operations_per_s=1e6)  # a step of LOAD takes 0.1 s at least

# (kind of event, seconds since the last one, how long the device says it ran)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "land", "rest", "read"]),
        st.floats(0, 20),
        st.one_of(st.just(0.0), st.floats(0, 30)),
    ),
    max_size=40,
)


def account(found: dict[str, float]) -> float:
    return found["busy_s"] + found["gap_s"] + found["idle_s"]


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_every_second_is_counted_once(events):
    now_s, launched_s = 100.0, 100.0
    times = Utilization(now_s)
    last = times.as_dict(now_s, is_running=False)
    device_s, is_working = 0.0, False
    for kind, passed_s, ran_s in events:
        now_s += passed_s
        if kind == "arrive":
            times.record_arrival(now_s)
            launched_s, is_working = now_s, True
        elif kind == "rest":
            times.record_idle(now_s)
            is_working = False
        elif kind == "land" and is_working:
            busy_s, gap_s = times.account_step(now_s, launched_s, ran_s, LOAD, 4, ran_s / 2)
            assert busy_s >= 0 and gap_s >= 0
            device_s += ran_s or now_s - launched_s
        found = times.as_dict(now_s, is_running=False)
        assert account(found) == pytest.approx(now_s - 100.0)
        assert all(found[name] >= last[name] for name in ("busy_s", "gap_s", "idle_s"))
        assert last["launching_s"] <= found["launching_s"] <= found["busy_s"]
        assert 0 <= found["busy_share"] <= 1 + 1e-9
        last = found
    assert last["busy_s"] <= device_s + 1e-6


def test_time_with_a_step_under_way_is_left_open_until_its_result() -> None:
    times = Utilization(0.0)
    times.record_arrival(1.0)
    assert account(times.as_dict(5.0, is_running=True)) == 1.0
    assert times.account_step(6.0, 2.0, 0.0, LOAD, 4) == (4.0, 1.0)
    assert account(times.as_dict(7.0, is_running=False)) == 7.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=50))
def test_results_that_are_fetched_late_move_less_than_a_step_of_busy_time(late_s):
    """The device's steps take 1 s, one after the other; nobody asks at once when one has ended."""
    times = Utilization(0.0)
    times.record_arrival(0.0)
    for ended_s, late in enumerate(late_s, 1):
        times.account_step(ended_s + late, 0.0, 1.0, LOAD, 4)
    assert len(late_s) - 0.9 <= times.busy_s <= len(late_s) + 1e-9  # rounding
    assert times.busy_s + times.gap_s == pytest.approx(len(late_s) + late_s[-1])


def test_the_recent_shares_forget_what_is_long_ago() -> None:
    times = Utilization(0.0)
    times.work, times.rates = WORK, RATES
    times.record_arrival(50.0)
    now_s = 50.0
    while now_s < 50 + 3 * WINDOW_S:  # each step 0.2 s, and 0.05 s before it
        now_s += 0.25
        times.account_step(now_s, now_s - 0.2, 0.0, LOAD, 4)
    found = times.as_dict(now_s, is_running=False)
    assert found["busy_share"] == pytest.approx(0.8)
    assert found["floor_share"] == pytest.approx(0.5)
    assert found["floor_s"] == pytest.approx(60 * 0.1) and found["num_bytes"] == 60_000
    assert in_short(found) == "busy 80.0% at 50% of the machine's rates"
    times.record_idle(now_s)
    idle = times.as_dict(now_s + 100, is_running=False)
    assert idle["busy_share"] == 0.0 and "floor_share" not in idle
    times.record_arrival(now_s + 200)
    times.account_step(now_s + 205, now_s + 200, 0.0, LOAD, 4)
    assert times.as_dict(now_s + 205, is_running=False)["busy_share"] == pytest.approx(0.5)


def test_steps_are_compared_with_what_they_took_at_the_start() -> None:
    times = Utilization(0.0)
    times.expected = StepCostModel.fit([StepSample(LOAD, 0.1)])
    times.record_arrival(0.0)
    now_s = 0.0
    for _ in range(100):  # each step 0.2 s, and 0.05 s before it
        now_s += 0.25
        times.account_step(now_s, now_s - 0.2, 0.0, LOAD, 4)
    assert times.as_dict(now_s, is_running=False)["slowness"] == pytest.approx(2.0, rel=0.01)
    times.record_idle(now_s)
    times.record_arrival(now_s + 100)
    times.account_step(now_s + 100.2, now_s + 100, 0.0, LOAD, 4)
    assert "slowness" not in times.as_dict(now_s + 100.2, is_running=False), "too little is known"


def test_unknown_figures_are_left_out() -> None:
    found = Utilization(0.0).as_dict(2.0, is_running=False)
    times = {"busy_s": 0.0, "gap_s": 0.0, "idle_s": 2.0}
    assert found == times | {"launching_s": 0.0, "busy_share": 0.0}
    assert in_short(found) == "busy 0.0%"


class Device:
    """Each step takes 1 s after the one before it, a launch 0.1 s of the host, a result 0.05 s."""

    def __init__(self, runner: FakeRunner, timing: StepTiming, *, is_measured: bool) -> None:
        self.runner, self.timing, self.is_measured = runner, timing, is_measured
        self.now_s = self.free_s = self.ran_s = 0.0
        self.ends_s: deque[float] = deque()

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)  # which may fail
        self.now_s += 0.1
        self.timing.build_s = 0.1
        self.free_s = max(self.now_s, self.free_s) + 1.0
        self.ends_s.append(self.free_s)

    def sample(self, masks: TokenMasks | None = None) -> None:
        self.runner.sample(masks)

    def result(self) -> StepResult:
        self.now_s = max(self.now_s, self.ends_s.popleft())
        self.ran_s += 1.0
        self.timing.device_s = 1.0 if self.is_measured else 0.0
        return self.runner.result()

    def reset(self) -> None:
        self.now_s = max(self.now_s, *self.ends_s, 0.0)
        self.ends_s.clear()
        self.runner.reset()


def engine_on(*, overlap: bool, is_measured: bool, faults: Faults | None = None):
    timing = StepTiming()
    memory = KVCacheManager(KVCacheConfig(GROUPS, 40, 8, True, b"secret"))
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    fake = FakeRunner(GROUPS, 40, 8, max_num_rows=8, max_num_tokens=100, model=MODEL, faults=faults)
    device = Device(fake, timing, is_measured=is_measured)
    engine = Engine(
        scheduler, device, LIMITS, timing=timing, clock=lambda: device.now_s, overlap=overlap
    )
    return engine, device


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_s_times_are_those_of_its_device(overlap, is_measured, tmp_path):
    engine, device = engine_on(overlap=overlap, is_measured=is_measured)
    device.now_s = 7.0  # nothing to do until then
    engine.add(request("a", max_tokens=6))
    path = tmp_path / "trace"
    with StepTrace(path) as trace:
        engine.trace = trace
        while engine.has_work():
            engine.step()
            device.now_s += 0.05
    ended_s = device.now_s
    device.now_s += 3.0
    found = engine.stats().utilization
    assert account(found) == pytest.approx(device.now_s)
    assert found["idle_s"] == pytest.approx(7.0 + 3.0 + 0.05)  # the last 0.05 are after its end
    assert found["busy_s"] == pytest.approx(device.ran_s)
    assert found["gap_s"] == pytest.approx(ended_s - 0.05 - 7.0 - device.ran_s)


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_steps_and_aborts_leave_no_time_uncounted(overlap):
    faults = Faults(sample_fails_at=frozenset({2, 5}))
    engine, device = engine_on(overlap=overlap, is_measured=False, faults=faults)
    for name in "abc":
        engine.add(request(name, max_tokens=6))
    for _ in range(5):
        engine.step()
        device.now_s += 0.05
    for name in "abc":
        engine.abort(name)
    engine.finish_steps()
    resting_s = device.now_s
    device.now_s += 10.0
    found = engine.stats().utilization
    assert account(found) == pytest.approx(device.now_s)
    assert found["idle_s"] == pytest.approx(device.now_s - resting_s)
    assert 0 < found["busy_s"] <= device.ran_s


def test_a_step_s_load_is_what_its_plan_computes() -> None:
    engine, _ = engine_on(overlap=True, is_measured=True)
    for name, length in (("a", 70), ("b", 9), ("c", 30)):
        engine.add(request(name, length, max_tokens=5))
    while engine.has_work():
        plan = engine.scheduler.schedule(0.0)
        if plan is None:
            engine._runner.reset()
            break
        load = engine.scheduler.budget.load
        assert load.num_decodes + load.num_chunk_tokens == plan.num_tokens
        assert load.num_chunks == sum(chunk.num_new_tokens > 0 for chunk in plan.chunks)


def test_rejected_drafts_are_not_useful_work() -> None:
    """A decoding row with 3 drafts, of which one was accepted: it got two tokens for its work."""
    work = StepWork(1000, 100, 10, 0, 7, 5)
    found = []
    for load, num_sampled, num_rejected in (
        (StepLoad(4, 400).with_drafts(99, 3), 5, 2),
        (StepLoad(4, 400).with_drafts(99, 1), 5, 0),
    ):
        times = Utilization(0.0)
        times.work = work
        times.account_step(1.0, 0.0, 0.0, load, num_sampled, 0.0, num_rejected)
        found.append((times.num_bytes, times.operations))
    assert found[0] == found[1] == (1000 + 100 + 5 * 10, 5 * 7 + 5 * 5)
