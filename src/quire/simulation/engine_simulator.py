"""Runs a simulation through the real engine and its loop.

`simulator` calls the scheduler and the runner directly. Here `Engine.step` calls them, and clients
use `Engine.add`, `fork` and `abort`. The simulated device is asynchronous: a step begins when it is
launched and the previous step has ended, and waiting for its result sets the clock to its end.
KeyboardInterrupt may interrupt a step before and after each call of the runner.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from math import isclose
from typing import TypeVar

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult, TokenMasks
from quire.engine.adapter_work import AdapterWork
from quire.engine.engine import Engine
from quire.simulation.fakes.fake_runner import FakeRunner, InjectedFailureError
from quire.simulation.report import SimulationReport
from quire.simulation.simulator import Simulator, result_bytes, run_simulator
from quire.simulation.workload import SimulationConfig

_T = TypeVar("_T")


def run_world(config: SimulationConfig) -> SimulationReport:
    """Run a simulation: through the engine if `config.through_engine` is set."""
    return run_simulator(EngineSimulator(config) if config.through_engine else Simulator(config))


class EngineSimulator(Simulator):
    """One run through the engine. No crashes are simulated, since a new engine can't resume
    forks."""

    def __init__(self, config: SimulationConfig) -> None:
        self._interrupt_rng = random.Random(f"interrupts of {config.seed}")
        super().__init__(config)

    def _start_engine(self) -> None:
        super()._start_engine()
        # Include the token ids that inject failures, which follow the vocabulary.
        limits = ModelLimits(self.config.nan_token_id + 1, self.config.max_model_len)
        self.engine = Engine(
            self.scheduler,
            _Device(self, self.runner),
            limits,
            clock=lambda: self.now_s,
            overlap=bool(self.config.overlap),
        )
        self.engine.grammars = self.grammars
        self.engine.adapters = AdapterWork(self.scheduler, self.adapters)
        self._started_s = self.now_s

    def _step(self) -> bool:
        num_steps, num_failed = self.report.num_steps, self.scheduler.stats.num_failed_steps
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        assert self.scheduler.num_steps_in_flight <= self.config.overlap
        self._check()
        self._receive(outputs)
        has_failed = self.scheduler.stats.num_failed_steps > num_failed
        return self.report.num_steps > num_steps and not has_failed

    def _check(self) -> None:
        super()._check()
        if self.report.num_steps % (16 * self.config.check_every) == 0:
            num_bytes = sum(group.bytes_per_block for group in self.config.groups[:1])
            total = self.config.num_blocks * num_bytes
            assert self.engine.memory_report().total_bytes == total

    def _finish(self) -> None:
        assert not self.engine.has_work()
        forgotten = not self.engine._requests and not self.engine.times._first_tokens
        assert forgotten, "the engine remembers requests that have ended"
        self._check_times()
        super()._finish()

    def _check_times(self) -> None:
        """Check that the engine's busy, gap and idle times add up to the time since its start."""
        found = self.engine.stats().utilization
        times_s = [found[name] for name in ("busy_s", "gap_s", "idle_s")]
        passed_s = self.now_s - self._started_s
        assert min(times_s) >= 0 and isclose(sum(times_s), passed_s, abs_tol=1e-6), found

    def _enter(self, request: Request, branches: list[Sequence]) -> list[Sequence]:
        self.engine.add(request)
        return self.engine.sequences(request.request_id)

    def _fork(self, parent: Sequence, branch_index: int, params: DecodingParams) -> Sequence:
        found = self.engine.fork(parent.request_id, parent.branch_index, params)
        assert found == branch_index, f"branch {found} of {parent} should be {branch_index}"
        return self.engine.sequences(parent.request_id)[-1]

    def _abort(self, sequence: Sequence) -> None:
        self.engine.abort(sequence.request_id, None if sequence.is_beam else sequence.branch_index)

    # ---- for the device ---------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> float:
        """Check and count a plan before it is executed; returns the seconds of its step."""
        self._check()
        return self._check_plan(plan)

    def on_sampled(self) -> None:
        """Let clients abort requests while a step is in flight."""
        self._abort_due(is_between=True)

    def on_result(self, result: StepResult) -> None:
        """Add a result to the digest."""
        self._digest.update(result_bytes(result))

    def interrupt_now_and_then(self) -> None:
        """Raise KeyboardInterrupt with the probability `interrupt_rate` of the config."""
        if self._interrupt_rng.random() < self.config.interrupt_rate:
            self.report.num_interrupts += 1
            raise KeyboardInterrupt


class _Device:
    """A `core.step.Runner` whose steps take virtual time and are reported to the simulator."""

    def __init__(self, simulator: EngineSimulator, runner: FakeRunner) -> None:
        self._simulator = simulator
        self._runner = runner
        self._ends_s: deque[float] = deque()  # the ends of the steps in flight

    def execute(self, plan: StepPlan) -> None:
        simulator = self._simulator
        begins_s = self._ends_s[-1] if self._ends_s else simulator.now_s
        self._ends_s.append(max(begins_s, simulator.now_s) + simulator.on_plan(plan))
        self._call(lambda: self._runner.execute(plan))

    def sample(self, masks: TokenMasks | None = None) -> None:
        self._call(lambda: self._runner.sample(masks))
        self._simulator.on_sampled()

    def result(self) -> StepResult:
        simulator = self._simulator
        simulator.now_s = max(simulator.now_s, self._ends_s[0])
        result = self._call(self._runner.result)
        self._ends_s.popleft()
        simulator.on_result(result)
        return result

    def reset(self) -> None:
        self._simulator.now_s = max(self._simulator.now_s, *self._ends_s, 0.0)
        self._ends_s.clear()
        self._runner.reset()

    def _call(self, do: Callable[[], _T]) -> _T:
        """Call the runner, with random interruptions before and after.

        Any error except an injected failure is a bug and is raised as an AssertionError, since the
        engine does not treat AssertionErrors as failed steps.
        """
        self._simulator.interrupt_now_and_then()
        try:
            found = do()
        except InjectedFailureError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        self._simulator.interrupt_now_and_then()
        return found
