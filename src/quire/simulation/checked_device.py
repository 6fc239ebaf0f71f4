"""The simulated device of `simulator`: its steps take virtual time, and are reported to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from quire.core.step import Drafts, StepPlan, StepResult, TokenMasks
from quire.simulation.fakes.fake_runner import FakeRunner, InjectedFailureError
from quire.simulation.virtual_engine import DeviceTime, VirtualClock

_T = TypeVar("_T")


class DeviceWatcher(Protocol):
    """The callbacks of a device, which `Simulator` implements."""

    def on_plan(self, plan: StepPlan) -> float:
        """Called before a plan is executed; returns the seconds of its step."""
        ...

    def on_sampled(self) -> None:
        """Called when a step was sampled, and is in flight."""
        ...

    def on_result(self, result: StepResult) -> None:
        """Called with each result."""
        ...

    def interrupt_now_and_then(self) -> None:
        """Called before and after each call of the runner; may raise KeyboardInterrupt."""
        ...


class CheckedDevice:
    """A `core.step.Runner` whose steps take virtual time and are checked by a fake runner."""

    def __init__(self, watcher: DeviceWatcher, runner: FakeRunner, clock: VirtualClock) -> None:
        self.watcher = watcher
        self.runner = runner
        self._time = DeviceTime(clock)

    def draft(self, plan: StepPlan) -> Drafts:
        """See `Runner`. Takes no virtual time."""
        return self._call(lambda: self.runner.draft(plan))

    def execute(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self._time.launch(self.watcher.on_plan(plan))
        self._call(lambda: self.runner.execute(plan))

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `Runner`."""
        self._call(lambda: self.runner.sample(masks))
        self.watcher.on_sampled()

    def result(self) -> StepResult:
        """See `Runner`."""
        self._time.wait()
        result = self._call(self.runner.result)
        self._time.land()
        self.watcher.on_result(result)
        return result

    def reset(self) -> None:
        """See `Runner`."""
        self._time.reset()
        self.runner.reset()

    def _call(self, do: Callable[[], _T]) -> _T:
        """Call the runner, with random interruptions before and after.

        Any error except an injected failure is a bug and is raised as an AssertionError, since the
        engine does not treat AssertionErrors as failed steps.
        """
        self.watcher.interrupt_now_and_then()
        try:
            found = do()
        except InjectedFailureError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        self.watcher.interrupt_now_and_then()
        return found
