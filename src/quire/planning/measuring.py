"""Measures the step times of a real engine while it serves calibration runs.

A step's time is the time from the previous step's result to its own result. It includes scheduling,
batch building, forward pass, sampling and the work on results, as when the engine serves.

Contexts enter the prefix cache without being computed: their sequences pass through the scheduler,
but not through the runner. Their blocks keep their old content, which takes as long to read as
computed K and V. Afterwards the engine has no requests and no cached prefixes.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import NoReturn

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, SamplingDefaults
from quire.core.scheduling.pacing import ConstantPacer, StepBudget, StepDemand
from quire.core.step import Runner, StepPlan, StepResult, TokenMasks
from quire.engine.engine import Engine
from quire.planning.calibration_runs import (
    ANSWERS,
    NUM_SETTLING_STEPS,
    NUM_STEADY_STEPS,
    CalibrationRun,
)
from quire.simulation.planned_work import PlannedWork, PlannedWorkCounter

#: Calibration runs per round. Each round is measured twice in succession, under similar conditions.
ROUND = 4
LEAST_RUNS = 24
#: The number of steps at the beginning of a run that are not measured, because the processor's
#: caches still hold data of earlier work.
NUM_WARM_STEPS = 6


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step that was measured twice."""

    #: The number of its calibration run.
    run: int
    work: PlannedWork
    #: The seconds that the step took in each of its two measurements.
    seconds: tuple[float, float]


class WatchedRunner:
    """Records plans, and passes each plan to an inner runner or makes up its result.

    The work of plans is counted after their steps, so that only the copy of the admitted tokens
    adds to a step's time. Invariant: the inner runner has the rows of the plans that were passed to
    it, and gets a release only for a row that it has.
    """

    def __init__(self, inner: Runner, block_size: int) -> None:
        self.inner = inner
        #: Whether steps bypass the inner runner.
        self.is_passed_over = False
        #: The id of the step whose result was returned last.
        self.landed_id = 0
        self._plans: list[StepPlan] = []
        self._work_counter = PlannedWorkCounter(block_size)
        self._inner_rows: set[int] = set()
        self._left: set[int] = set()  # inner rows that bypassed steps released
        self._made_up: deque[StepResult] = deque()  # results of bypassed steps

    def draft(self, plan: StepPlan) -> NoReturn:
        """See `Runner`. Not called: plans and replays simulate no drafts."""
        raise AssertionError(f"step {plan.step_id} orders drafts, but nothing makes them")

    def execute(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self._plans.append(plan.with_own_tokens())
        if self.is_passed_over:
            self._left |= self._inner_rows & set(plan.release)
            sampled = list(self.pop_works()[plan.step_id].sampled)
            self._made_up.append(StepResult(plan.step_id, sampled, [(0,)] * len(sampled)))
            return
        left = (self._inner_rows & set(plan.release)) | self._left
        self._inner_rows -= left
        self._inner_rows |= {each.row for each in plan.admit}
        self._left.clear()
        self.inner.execute(replace(plan, release=tuple(sorted(left))))

    def pop_works(self) -> dict[int, PlannedWork]:
        """The work of each step planned since the last call, by step id and in order."""
        plans, self._plans = self._plans, []
        return {plan.step_id: self._work_counter.count(plan) for plan in plans}

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `Runner`."""
        if not self.is_passed_over:
            self.inner.sample(masks)

    def result(self) -> StepResult:
        """See `Runner`."""
        result = self._made_up.popleft() if self.is_passed_over else self.inner.result()
        self.landed_id = result.step_id
        return result

    def reset(self) -> None:
        """See `Runner`."""
        self._plans.clear()
        self._made_up.clear()
        self._work_counter.reset()
        self._inner_rows.clear()
        self._left.clear()
        self.inner.reset()


class _Stopwatch(ConstantPacer):
    """Measures for each step the seconds from the previous step's result to its own result.

    The engine does not report a step during which it mostly waited for its caller. Such a step, and
    the next step, are not measured.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0, 0.0  # a step, and the time of its result
        #: The limit of prompt tokens in a step.
        self.most_tokens = 1
        #: The measured times by step id.
        self.seconds: dict[int, float] = {}

    def start(self, most_tokens: int, landed_id: int) -> None:
        """Start measuring, directly after the result of step `landed_id`."""
        self.most_tokens = most_tokens
        self._last = landed_id, self._clock()
        self.seconds = {}

    def open_step(self, demand: StepDemand) -> StepBudget:
        """See `Pacer`."""
        return StepBudget(min(demand.num_tokens, self.most_tokens))

    def observe(self, step_id: int, seconds: float) -> None:
        """See `Pacer`."""
        now_s, (last_id, last_s) = self._clock(), self._last
        if step_id == last_id + 1:
            self.seconds[step_id] = now_s - last_s
        self._last = step_id, now_s


def measure_runs(
    engine: Engine,
    watched: WatchedRunner,
    runs: Iterator[tuple[int, CalibrationRun]],
    time_limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredStep]:
    """Measure calibration runs in rounds for about time_limit_s, but at least one round.

    If run 0 is among them, at least LEAST_RUNS are measured. `watched` is the runner of `engine`,
    which has no requests, and all its KV blocks have been written (`write_blocks`). `runs` yields
    numbered runs without end.
    """
    bench = _CalibrationBench(engine, watched, clock)
    found: list[MeasuredStep] = []
    try:
        # First, warm up: with a whole round if this engine has never run, else with one run, since
        # other work may have filled the processor's caches.
        drawn = list(islice(runs, ROUND))
        is_first = drawn[0][0] == 0
        for each in drawn if is_first else drawn[:1]:
            bench.measure(*each)
        # Then, measure each round twice until the time is over.
        deadline_s, number = clock() + time_limit_s, 0
        least = LEAST_RUNS if is_first else ROUND
        while True:
            first, second = ([bench.measure(*each) for each in drawn] for _ in range(2))
            for (index, _), once, again in zip(drawn, first, second, strict=True):
                found += _pair(index, once, again)
            number += len(drawn)
            if number >= least and clock() >= deadline_s:
                break
            drawn = list(islice(runs, ROUND))
    finally:
        bench.end()
    return found


#: The steps of a run with their seconds; None if a step's time is unknown.
_Timed = list[tuple[PlannedWork, float | None]]


def _pair(run: int, once: _Timed, again: _Timed) -> Iterator[MeasuredStep]:
    """Yield the steps that did equal work in both measurements of a run. After a failed step, the
    works differ."""
    for (work, first_s), (other, second_s) in zip(once, again, strict=False):
        if work == other and first_s is not None and second_s is not None:
            yield MeasuredStep(run, work, (first_s, second_s))


class _CalibrationBench:
    """Serves calibration runs on an engine and measures their steps.

    Invariant: between two runs the engine has no requests.
    """

    def __init__(self, engine: Engine, watched: WatchedRunner, clock: Callable[[], float]) -> None:
        self._engine, self._watched = engine, watched
        self._pacer = engine.scheduler.pacer
        self._watch = _Stopwatch(clock)
        engine.scheduler.pacer = self._watch
        self._defaults = engine.limits.defaults
        self._num_requests = 0
        self._num_tokens: dict[str, int] = {}  # by request id, the number of tokens at its end

    def end(self) -> None:
        """Remove all requests and cached prefixes, and restore the engine's pacer."""
        self._engine.finish_steps()
        self._engine.clear_prefixes()
        self._engine.scheduler.pacer = self._pacer

    def measure(self, number: int, run: CalibrationRun) -> _Timed:
        """Serve a run and return its steps in order."""
        # First, draw tokens and put all contexts into the prefix cache.
        rng = random.Random(f"tokens {number}")
        engine, vocab = self._engine, range(self._engine.limits.vocab_size)
        joins = [each for each in zip(run.waves, cycle(ANSWERS), strict=False) if each[0]]
        waves, answers = [wave for wave, _ in joins], [answer for _, answer in joins]
        rows = [rng.choices(vocab, k=length) for length in run.contexts]
        joining = [[rng.choices(vocab, k=cached) for cached, _ in wave] for wave in waves]
        own = [[rng.choices(vocab, k=length) for _, length in wave] for wave in waves]
        self._cache([*rows, *(each for wave in joining for each in wave)])
        # Then, start the decoding rows, and measure once the caches are warm.
        ends: dict[int, list[int]] = {}
        num_steps = NUM_WARM_STEPS + NUM_STEADY_STEPS + NUM_SETTLING_STEPS * len(waves)
        for context in rows:
            self._add([*context, 1], num_steps + 1)
        self._watch.most_tokens = run.most_tokens
        self._step({}, NUM_WARM_STEPS)
        self._watched.pop_works()
        self._watch.start(run.most_tokens, self._watched.landed_id)
        self._step(ends, NUM_STEADY_STEPS)
        # Then, let the waves of prompts join, and run until all have ended.
        for contexts, prompts, answer in zip(joining, own, answers, strict=True):
            for context, prompt in zip(contexts, prompts, strict=True):
                self._add([*context, *prompt], answer)
            self._step(ends, NUM_SETTLING_STEPS)
        while engine.has_work():
            self._step(ends, 1)
        # Finally, join each step's work with its time and the sequences that ended.
        works = self._watched.pop_works()
        engine.clear_prefixes()
        timed: _Timed = []
        for step_id, work in works.items():
            ended = ends.get(step_id, [])
            work = work._replace(num_ended=len(ended), num_ended_tokens=sum(ended))
            timed.append((work, self._watch.seconds.get(step_id)))
        return timed

    def _cache(self, contexts: Sequence[Sequence[int]]) -> None:
        """Put the full blocks of contexts into the prefix cache without computing them."""
        self._watched.is_passed_over = True
        self._watch.most_tokens = self._engine.scheduler.config.max_num_batched_tokens
        for context in contexts:
            self._add(context, 1)
        while self._engine.has_work():
            self._step({}, 1)
        self._watched.is_passed_over = False

    def _add(self, token_ids: Sequence[int], num_output_tokens: int) -> None:
        if not token_ids:
            return
        self._num_requests += 1
        params = usual_params(num_output_tokens, self._defaults, self._num_requests)
        name = f"measured-{self._num_requests}"
        self._num_tokens[name] = len(token_ids) + num_output_tokens
        self._engine.add(Request(name, token_ids, params))

    def _step(self, ends: dict[int, list[int]], num_steps: int) -> None:
        """Run steps. Adds to `ends`, by step id, the lengths of the sequences that end."""
        for _ in range(num_steps):
            outputs = self._engine.step()
            ended = [output for output in outputs if output.finish_reason is not None]
            if ended:
                lengths = [self._num_tokens.pop(output.request_id) for output in ended]
                ends[self._watched.landed_id] = lengths


def usual_params(num_output_tokens: int, defaults: SamplingDefaults, seed: int) -> DecodingParams:
    """Parameters of a client that sets only the number of tokens. It gets exactly that number."""
    return DecodingParams(max_tokens=num_output_tokens, seed=seed, **asdict(defaults))
