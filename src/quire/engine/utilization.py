"""Keeps account of how busy the device, or the cores, are.

    busy    a step is under way: from the moment when its batch is built to its result
    gap     requests are there, but no step is under way: scheduling, batches being built, results
            being applied, messages, failed steps, waiting for memory tiers or grammars
    idle    there is nothing to do

The three add up to the time since the start. A device that runs steps by itself says how long it
ran each (`StepTiming.device_s`), and in how much of that it may have waited within the step, for
kernels that the host had not launched yet (`launching_s`): busy includes these pauses. Elsewhere a
step runs from its launch, or from the result before it, to its own. Beside the time the steps'
bytes and operations are counted (`step_work`), and the least time in which the machine could have
moved and computed them: the floor. And what the steps would have taken by the cost model that was
measured when the engine started: so it is seen whether the machine has become slower.

A few additions for a step. Reads no clock: the times are given. Used by `engine` alone.
"""

from typing import Any, NamedTuple, Protocol

from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.engine.step_work import MachineRates, StepWork

WINDOW_S = 5.0
"""The recent shares are of the last so many seconds, or up to twice as many."""


LEAST_EXPECTED_S = 0.25
"""What took less says little of how fast the machine is."""


class DeviceMonitor(Protocol):
    """What the device's driver says; see `observability.nvml`."""

    def read(self) -> dict[str, float]:
        """The last reading, by name; empty before the first. Does not wait."""
        ...


class _Accounts(NamedTuple):
    """At one moment, since the start."""

    busy_s: float = 0.0
    gap_s: float = 0.0
    idle_s: float = 0.0
    num_bytes: float = 0.0
    operations: float = 0.0
    floor_s: float = 0.0
    expected_s: float = 0.0


class Utilization:
    """The accounts of one engine.

    Invariant: busy_s + gap_s + idle_s is the time from the start to the last event that was told,
    and launching_s is no more than busy_s.

    work, rates: what a step takes, and what the machine does; None: not known, or not measured, and
    what follows from it is left out. expected: what steps took at the start; None: it was not
    measured. monitor: of a GPU; None: there is none.
    """

    def __init__(self, now_s: float) -> None:
        self.work: StepWork | None = None
        self.rates: MachineRates | None = None
        self.expected: StepCostModel | None = None
        self.monitor: DeviceMonitor | None = None
        self.busy_s = self.gap_s = self.idle_s = 0.0
        self.launching_s = 0.0
        self.num_bytes = self.operations = self.floor_s = self.expected_s = 0.0
        self._is_idle = True
        self._until_s = now_s  # the time before it is accounted for
        self._owed_s = 0.0  # time of steps on the device that no time on the host was left for
        self._landed_s = float("-inf")
        # Sums at two moments, the later of them at most WINDOW_S old while steps end.
        self._earlier = self._later = _Accounts()
        self._later_s = now_s

    @property
    def worked_s(self) -> float:
        """The time so far in which there was anything to do."""
        return self.busy_s + self.gap_s

    def arrive(self, now_s: float) -> None:
        """A request has come."""
        if self._is_idle:
            self._pass_idle(now_s)
            self._is_idle = False

    def rest(self, now_s: float) -> None:
        """Nothing is left to do."""
        if not self._is_idle:
            self._pass_gap(now_s)
            self._is_idle = True
            self._owed_s = 0.0

    def land(
        self,
        now_s: float,
        launched_s: float,
        device_s: float,
        load: StepLoad,
        num_sampled: int,
        launching_s: float = 0.0,
    ) -> tuple[float, float]:
        """A step's result has come. launched_s: since when the step was there to be run. device_s:
        how long it ran; 0: nobody has measured it. launching_s: see `StepTiming`. Returns how much
        of the time since the last event was busy, and how much was not."""
        passed_s = now_s - self._until_s
        ran_s = device_s or max(0.0, now_s - max(launched_s, self._landed_s))
        busy_s = min(ran_s + self._owed_s, passed_s)
        self._owed_s += ran_s - busy_s
        self._until_s = self._landed_s = now_s
        self.busy_s += busy_s
        self.gap_s += passed_s - busy_s
        self.launching_s = min(self.launching_s + launching_s, self.busy_s)
        if self.expected is not None:
            self.expected_s += self.expected.predict_s(load)
        if self.work is not None:
            num_bytes, operations = self.work.of(load, num_sampled)
            self.num_bytes += num_bytes
            self.operations += operations
            if self.rates is not None:
                self.floor_s += self.rates.floor_s(num_bytes, operations)
        if now_s - self._later_s >= WINDOW_S:
            self._turn(now_s)
        return busy_s, passed_s - busy_s

    def as_dict(self, now_s: float, *, is_running: bool) -> dict[str, Any]:
        """For `EngineStats`, at now_s. is_running: a step is under way, so the time since the last
        event is not accounted for yet.

        busy_share: of the recent time. floor_share: the recent floor by the recent busy time; left
        out where there was none. slowness: the recent busy time by what its steps were expected to
        take, if they were expected to take LEAST_EXPECTED_S.
        """
        if self._is_idle:
            self._pass_idle(now_s)
        elif not is_running:
            self._pass_gap(now_s)
        if now_s - self._later_s >= WINDOW_S:
            self._turn(now_s)
        sums, since = self._sums(), self._earlier
        busy_s = sums.busy_s - since.busy_s
        recent_s = busy_s + sums.gap_s - since.gap_s + sums.idle_s - since.idle_s
        found: dict[str, Any] = {
            "busy_s": sums.busy_s,
            "gap_s": sums.gap_s,
            "idle_s": sums.idle_s,
            "launching_s": self.launching_s,
            "busy_share": busy_s / recent_s if recent_s > 0 else 0.0,
        }
        expected_s = sums.expected_s - since.expected_s
        if expected_s >= LEAST_EXPECTED_S:
            found["slowness"] = busy_s / expected_s
        if self.work is not None:
            found |= {"num_bytes": sums.num_bytes, "operations": sums.operations}
        if self.rates is not None:
            if busy_s > 0:  # else it has no share
                found["floor_share"] = (sums.floor_s - since.floor_s) / busy_s
            found |= {
                "floor_s": sums.floor_s,
                "bytes_per_s": self.rates.bytes_per_s,
                "operations_per_s": self.rates.operations_per_s,
            }
        if self.monitor is not None:
            found["device"] = self.monitor.read()
        return found

    def _sums(self) -> _Accounts:
        return _Accounts(
            self.busy_s,
            self.gap_s,
            self.idle_s,
            self.num_bytes,
            self.operations,
            self.floor_s,
            self.expected_s,
        )

    def _pass_gap(self, now_s: float) -> None:
        self.gap_s += now_s - self._until_s
        self._until_s = now_s

    def _pass_idle(self, now_s: float) -> None:
        """What went before the last WINDOW_S of a long pause is not recent any more."""
        early_s = now_s - WINDOW_S - self._until_s
        if early_s > 0:
            self.idle_s += early_s
            self._until_s += early_s
            self._earlier = self._later = self._sums()
            self._later_s = self._until_s
        self.idle_s += now_s - self._until_s
        self._until_s = now_s

    def _turn(self, now_s: float) -> None:
        self._earlier, self._later, self._later_s = self._later, self._sums(), now_s


def in_short(utilization: dict[str, Any]) -> str:
    """The recent shares, for a log line."""
    text = f"busy {100 * utilization['busy_share']:.1f}%"
    if "floor_share" in utilization:
        text += f" at {100 * utilization['floor_share']:.0f}% of the machine's rates"
    return text
