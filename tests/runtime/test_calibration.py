"""Start-up probes: what is run, what is left behind, and when it ends."""

import itertools
from collections.abc import Iterator

import pytest

from quire.assembly.build import build_engine
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.core.scheduling.invariants import check_idle
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.step import Runner, StepPlan, StepResult, TokenLogprobs, TokenMasks
from quire.engine.engine import Engine
from quire.runtime.calibration import (
    LARGEST_RATIO,
    LOGPROB_CHUNKS,
    LONG_CONTEXT,
    NUM_CHECKS,
    Probe,
    RunnerShape,
    calibrate,
    calibrated_model,
    make_probes,
    still_holds,
)

SHAPE = RunnerShape(
    num_rows=12,
    max_num_tokens=256,
    max_model_len=2048,
    groups=(KVGroup((0,), KVKind.FULL, 64), KVGroup((0,), KVKind.STATE, 64, num_state_blocks=3)),
    num_blocks=600,
    block_size=16,
    vocab_size=100,
)
BASE_S, TOKEN_S = 0.004, 0.0002


class TimedRunner(Runner):
    """Checks each plan against its own rows; steps take a base and so much a token, on a clock."""

    def __init__(self, base_s: float = BASE_S) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.rows: set[int] = set()
        self.num_resets = 0
        self._base_s = base_s

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> None:
        assert self.rows == set(plan.release), "rows were left behind"
        self.rows = {admission.row for admission in plan.admit}
        assert len(self.rows) == plan.num_rows <= SHAPE.num_rows
        assert plan.num_tokens <= SHAPE.max_num_tokens
        written = [block for new in plan.admit for table in new.block_tables for block in table]
        assert len(written) == len(set(written)), "two tables share a block"
        assert max(written) < SHAPE.num_blocks
        for new in plan.admit:
            chunk = next((c.num_new_tokens for c in plan.chunks if c.row == new.row), 1)
            reached = new.num_computed_tokens + chunk
            assert reached <= len(new.token_ids) <= SHAPE.max_model_len
            tokens, states = new.block_tables
            assert len(tokens) * SHAPE.block_size >= reached and len(states) == 3
        self.plans.append(plan)
        self.now_s += self._base_s + TOKEN_S * plan.num_tokens

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert masks is None

    def result(self) -> StepResult:
        return StepResult(self.plans[-1].step_id, (), ())

    def reset(self) -> None:
        self.rows = set()
        self.num_resets += 1


def test_the_samples_say_what_was_run() -> None:
    runner = TimedRunner()
    samples = calibrate(runner, SHAPE, time_limit_s=1.0, clock=runner.clock)
    for load, seconds in samples:
        num_tokens = load.num_decodes + load.num_chunk_tokens
        assert seconds == pytest.approx(BASE_S + TOKEN_S * num_tokens)
    loads = [sample.load for sample in samples]
    assert {load.num_decodes for load in loads if not load.num_chunk_tokens} == {1, 2, 4, 8, 12}
    assert StepLoad(2, 2 * (LONG_CONTEXT + 1)) in loads
    assert {load.num_logprob_tokens for load in loads} == {0, *LOGPROB_CHUNKS}
    asking = [plan for plan in runner.plans if plan.admit[-1].params.prompt_logprobs]
    assert {plan.chunks[0].num_new_tokens for plan in asking} == set(LOGPROB_CHUNKS)
    assert len(loads) == len(set(loads))


class FirstIsSlow(TimedRunner):
    """Minutes for the first step of so many tokens, as where kernels are compiled for it."""

    def execute(self, plan: StepPlan) -> None:
        is_new = all(plan.num_tokens != other.num_tokens for other in self.plans)
        super().execute(plan)
        self.now_s += 60.0 * is_new


def test_the_first_step_of_a_kind_is_not_measured() -> None:
    runner = FirstIsSlow()
    samples = calibrate(runner, SHAPE, warms_up=True, time_limit_s=1.0, clock=runner.clock)
    assert [sample.load for sample in samples] == [probe.load for probe in make_probes(SHAPE)]
    for load, seconds in samples:
        num_tokens = load.num_decodes + load.num_chunk_tokens
        assert seconds == pytest.approx(BASE_S + TOKEN_S * num_tokens)


def test_no_row_is_left_and_plans_are_in_order() -> None:
    runner = TimedRunner()
    calibrate(runner, SHAPE, clock=runner.clock)
    assert (runner.rows, runner.num_resets) == (set(), 1)
    ids = [plan.step_id for plan in runner.plans]
    assert ids == sorted(set(ids))


def test_blocks_are_written_before_attention_over_them_is_measured() -> None:
    runner = TimedRunner()
    calibrate(runner, SHAPE, clock=runner.clock)
    first, *others = runner.plans
    touched = {copy.target for copy in first.copies} | {copy.source for copy in first.copies}
    read = {
        block
        for plan in others
        for new in plan.admit
        for table in new.block_tables
        for block in table
    }
    assert read <= touched
    assert not any(plan.copies for plan in others)


def test_chunks_grow_until_one_is_beyond_any_pace() -> None:
    """On a machine where tokens cost much, a chunk of a few hundred is no use to anybody."""
    runner = TimedRunner(base_s=0.0)
    samples = calibrate(runner, SHAPE, clock=runner.clock)
    longest_s = max(s for load, s in samples if not load.num_chunk_tokens)
    chunks = [
        (load, s)
        for load, s in samples
        if load.num_chunk_tokens and load.num_decode_pairs and not load.num_logprob_tokens
    ]
    beyond = [load for load, s in chunks if s > LARGEST_RATIO * longest_s]
    assert len(beyond) == 1
    assert max(load.num_chunk_tokens for load, _ in chunks) == beyond[0].num_chunk_tokens < 256


def test_slow_steps_are_few() -> None:
    """A second a step: about LEAST_STEPS of them, and each probe once is enough."""
    runner = TimedRunner(base_s=1.0)
    samples = calibrate(runner, SHAPE, time_limit_s=1.5, clock=runner.clock)
    assert runner.now_s < 40
    assert StepCostModel.fit(samples).predict_s(StepLoad(3, 30)) == pytest.approx(1, rel=0.05)


def test_the_first_round_counts_only_without_another() -> None:
    """In it everything is touched for the first time."""
    runner = TimedRunner()
    execute = runner.execute
    costs: Iterator[float] = itertools.chain([0.05] * 18, itertools.repeat(0.0))

    def execute_cold(plan: StepPlan) -> None:
        execute(plan)
        runner.now_s += next(costs)

    runner.execute = execute_cold  # type: ignore[method-assign]
    samples = calibrate(runner, SHAPE, time_limit_s=3.0, clock=runner.clock)
    assert max(sample.seconds for sample in samples) < 0.06


def test_rows_are_dropped_when_a_probe_fails() -> None:
    runner = TimedRunner()
    execute = runner.execute

    def fail(plan: StepPlan) -> None:
        execute(plan)
        if len(runner.plans) == 4:
            raise RuntimeError("out of memory")

    runner.execute = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        calibrate(runner, SHAPE, clock=runner.clock)
    assert (runner.rows, runner.num_resets) == (set(), 1)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"num_rows": 1}, Probe(1, 8)),
        ({"max_model_len": 20}, Probe(1, 64)),
        ({"num_blocks": 7}, Probe(2)),
        ({"max_num_tokens": 12}, Probe(1, 16)),
    ],
)
def test_probes_without_room_are_left_out(change: dict[str, int], missing: Probe) -> None:
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__slots__} | change
    probes = make_probes(RunnerShape(**fields))
    assert probes[0] == Probe(1)
    assert missing in make_probes(SHAPE)
    assert missing not in probes


def test_a_paced_engine_gives_what_an_unpaced_one_gives(why_torch: str | None) -> None:
    """On native kernels to the bit, log-probabilities of prompts too. Calibrated on the runner that
    then serves; nothing of it is left in rows, blocks or cache."""
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    options |= {"num_blocks": 60, "max_model_len": 200}
    found = []
    for ratio in (0.0, 1.1):
        engine = build_engine({**options, "max_itl_ratio": ratio})
        check_idle(engine.scheduler)
        assert isinstance(engine.scheduler.pacer, StepPacer) is bool(ratio)
        if isinstance(engine.scheduler.pacer, StepPacer):
            model = engine.scheduler.pacer.model
            engine.scheduler.pacer = StepPacer(PacingConfig(ratio, max_late_rows=0), model)
        found.append(tokens_and_steps(engine))
    (plain, plain_logprobs, num_plain_steps), (paced, paced_logprobs, num_paced_steps) = found
    assert paced == plain
    if why_torch is None:
        assert paced_logprobs == plain_logprobs
    else:
        for entry, expected in zip(paced_logprobs, plain_logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert num_paced_steps > num_plain_steps, "no prompt was sliced"


def tokens_and_steps(engine: Engine) -> tuple[dict[str, list[int]], list[TokenLogprobs], int]:
    """What three requests get that come one after the other: tokens, the log-probabilities of the
    prompts of two of them, and in how many steps."""
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}

    def step() -> None:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs is not None:
                logprobs[output.request_id] = list(output.prompt_logprobs)

    for index in range(3):
        prompt = [2 + (11 * index + 7 * place) % 900 for place in range(60)]
        num_best = None if index == 1 else 5
        params = DecodingParams(max_tokens=20, temperature=0.0, prompt_logprobs=num_best)
        engine.add(Request(f"request-{index}", prompt, params))
        step()
    while engine.has_work():
        step()
    assert [len(got) for got in tokens.values()] == [20, 20, 20]
    assert {name: len(got) for name, got in logprobs.items()} == {"request-0": 59, "request-2": 59}
    in_order = [entry for _, got in sorted(logprobs.items()) for entry in got]
    return tokens, in_order, engine.scheduler.stats.num_steps


@pytest.mark.parametrize(
    ("factor", "holds"), [(1.0, True), (1.4, True), (0.7, True), (1.6, False), (0.6, False)]
)
def test_a_model_holds_until_steps_change_by_half(factor: float, holds: bool) -> None:
    model = calibrated_model(TimedRunner(), SHAPE, 2.2)
    alone_s = model.predict_s(StepLoad(1, 1))
    runner = TimedRunner(base_s=factor * alone_s - TOKEN_S)
    assert still_holds(model, runner, SHAPE, runner.clock) == holds
    assert len(runner.plans) == 1 + NUM_CHECKS and not runner.rows


def test_a_model_that_predicts_no_time_does_not_hold() -> None:
    model = StepCostModel([0.0] * len(calibrated_model(TimedRunner(), SHAPE, 2.2).coefficients))
    runner = TimedRunner()
    assert not still_holds(model, runner, SHAPE, runner.clock)


def test_a_first_step_that_touches_memory_does_not_count() -> None:
    runner = FirstIsSlow()
    model = StepCostModel.fit([StepSample(StepLoad(1, 1), BASE_S + TOKEN_S)])
    assert still_holds(model, runner, SHAPE, runner.clock)
