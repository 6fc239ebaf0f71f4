"""Runs a runner's steps in a thread, while the engine plans the next step.

On the CPU a step is computed within `execute` and `sample`. With this wrapper around the runner,
`execute` and `sample` only queue the work, as on a device. So the engine applies a step's result
and plans while the next step runs, because the kernels release Python's lock. Made by
`assembly.build` if `async_scheduling` is set.
"""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from quire.core.step import Drafts, Runner, StepPlan, StepResult, TokenMasks
from quire.observability.step_trace import StepTiming


class StepsDroppedError(Exception):
    """Raised in queued steps that were dropped; no caller waits for their results."""


class BackgroundRunner:
    """A `core.step.Runner` that wraps another runner. While steps are queued, only its thread calls
    the other runner.

    Invariant: after a failure, until `reset`, no queued step is carried out, because its plan
    assumes the steps before it.
    """

    def __init__(self, runner: Runner, timing: StepTiming) -> None:
        """timing: where `runner` writes how long the parts of its last step took."""
        #: Timing of the step whose result was fetched last, as a device reports it: device_s leaves
        #: out the building of the batch.
        self.timing = StepTiming(is_of_result=True)
        self._runner = runner
        self._own_timing = timing
        self._thread = ThreadPoolExecutor(1, "quire-steps")
        self._failure: BaseException | None = None
        self._results: deque[Future[tuple[StepResult, StepTiming]]] = deque()
        # One event for each step without a fetched result, set once its kernels run or it failed.
        self._begun: deque[threading.Event] = deque()
        self._current: threading.Event | None = None  # event of the step being executed

    def on_forward(self) -> None:
        """Called in the thread when the runner has built the batch of the step that it executes."""
        if self._current is not None:
            self._current.set()

    def draft(self, plan: StepPlan) -> Drafts:
        """See `core.step.Runner`. Waits for the steps that are queued."""
        return self._thread.submit(self._draft, plan).result()

    def execute(self, plan: StepPlan) -> None:
        """See `core.step.Runner`. Copies the token ids, which the scheduler may change after this
        call."""
        begun = threading.Event()
        self._begun.append(begun)
        self._thread.submit(self._execute, plan.with_own_tokens(), begun)

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `core.step.Runner`."""
        self._results.append(self._thread.submit(self._sample, masks))

    def result(self) -> StepResult:
        """See `core.step.Runner`. Raises the exception of the step, or of an earlier step."""
        result, timing = self._results[0].result()
        self._results.popleft()
        self._begun.popleft()
        if self._begun:
            self._begun[0].wait()
        own = self.timing
        own.build_s, own.plan_s, own.forward_s = timing.build_s, timing.plan_s, timing.forward_s
        own.sample_s = timing.sample_s
        own.device_s = timing.plan_s + timing.forward_s + timing.sample_s
        return result

    def reset(self) -> None:
        """See `core.step.Runner`. Waits for the step that runs."""
        self._failure = StepsDroppedError()
        self._thread.submit(self._runner.reset).result()
        self._results.clear()
        self._begun.clear()
        self._failure = None

    def _draft(self, plan: StepPlan) -> Drafts:
        if self._failure is not None:
            raise self._failure
        return self._runner.draft(plan)

    def _execute(self, plan: StepPlan, begun: threading.Event) -> None:
        if self._failure is None:
            self._current = begun
            try:
                self._runner.execute(plan)
            except BaseException as error:  # `result` raises it
                self._failure = error
        begun.set()

    def _sample(self, masks: TokenMasks | None) -> tuple[StepResult, StepTiming]:
        if self._failure is not None:
            raise self._failure
        try:
            self._runner.sample(masks)
            return self._runner.result(), replace(self._own_timing)
        except BaseException as error:
            self._failure = error
            raise
