"""Accounts for the time in which the device, or the cores, are busy.

    busy    a step is running: from the moment when its batch is built to its result
    gap     there are requests, but no step is running: scheduling, batches being built, results
            being applied, messages, failed steps, waiting for memory tiers or grammars
    idle    there is no request

The three add up to the time since the start. A device that runs steps by itself reports how long
each step ran (`StepTiming.device_s`). It also reports for how much of that time the step may have
waited for kernels that the host had not launched yet (`launching_s`). Busy time includes these
pauses. Otherwise a step runs from its launch, or from the result before it, to its own result.

The bytes and operations of steps are counted, too (`step_work`), with the floor: the least time in
which the machine could have moved and computed them. The time that the start-up cost model predicts
is summed, too; it shows whether the machine has become slower.

A step costs a few additions. Reads no clock: callers pass the time. Used by `engine` alone.
"""

from typing import Any, NamedTuple

from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.engine.step_work import MachineRates, StepWork
from quire.observability.nvml import GpuReadings

WINDOW_S = 5.0
"""Recent shares cover at least the last WINDOW_S seconds, and at most twice as many."""


LEAST_EXPECTED_S = 0.25
"""Minimum predicted time that is compared with the measured one, in seconds."""


class _Accounts(NamedTuple):
    """The sums since the start, at one moment."""

    busy_s: float = 0.0
    gap_s: float = 0.0
    idle_s: float = 0.0
    num_bytes: float = 0.0
    operations: float = 0.0
    floor_s: float = 0.0
    expected_s: float = 0.0


class Utilization:
    """The accounts of one engine.

    Invariant: busy_s + gap_s + idle_s is the time from the start to the last recorded event, and
    launching_s is at most busy_s.
    """

    def __init__(self, now_s: float) -> None:
        #: Bytes and operations of a step; None if they are unknown, which leaves out the results
        #: that are computed from them.
        self.work: StepWork | None = None
        #: Rates of the machine; None if they were not measured.
        self.rates: MachineRates | None = None
        #: Predicts step times as measured at the start; None if no step was measured.
        self.expected: StepCostModel | None = None
        #: Monitor of a GPU; None without one.
        self.monitor: GpuReadings | None = None
        self.busy_s = self.gap_s = self.idle_s = 0.0
        self.launching_s = 0.0
        self.num_bytes = self.operations = self.floor_s = self.expected_s = 0.0
        self._is_idle = True
        self._until_s = now_s  # time up to which everything is accounted for
        self._owed_s = 0.0  # device time beyond the host time accounted so far
        self._landed_s = float("-inf")
        # Sums at two moments, the later of them at most WINDOW_S old while steps end.
        self._earlier = self._later = _Accounts()
        self._later_s = now_s

    @property
    def worked_s(self) -> float:
        """Seconds with at least one request since the start."""
        return self.busy_s + self.gap_s

    def record_arrival(self, now_s: float) -> None:
        """Note that a request has arrived."""
        if self._is_idle:
            self._pass_idle(now_s)
            self._is_idle = False

    def record_idle(self, now_s: float) -> None:
        """Note that no request is left."""
        if not self._is_idle:
            self._pass_gap(now_s)
            self._is_idle = True
            self._owed_s = 0.0

    def account_step(
        self,
        now_s: float,
        launched_s: float,
        device_s: float,
        load: StepLoad,
        num_sampled: int,
        launching_s: float = 0.0,
        num_rejected: int = 0,
    ) -> tuple[float, float]:
        """Account for a step whose result has come; returns the busy and the gap time since the
        last event.

        The step could run from `launched_s` on. It ran for `device_s`; 0 if that was not measured.
        See `StepTiming` about `launching_s`. The work of the num_rejected drafts in `load` does not
        count as useful, except for their attention, which is not measured separately.
        """
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
            if num_rejected:
                load = load.without_drafts(num_rejected)
            num_bytes, operations = self.work.of(load, num_sampled)
            self.num_bytes += num_bytes
            self.operations += operations
            if self.rates is not None:
                self.floor_s += self.rates.floor_s(num_bytes, operations)
        if now_s - self._later_s >= WINDOW_S:
            self._start_window(now_s)
        return busy_s, passed_s - busy_s

    def as_dict(self, now_s: float, *, is_running: bool) -> dict[str, Any]:
        """The accounts at now_s, for `EngineStats`.

        is_running: a step is running, so the time since the last event is not accounted for yet.

        - busy_share: busy time as a share of recent time.
        - floor_share: recent floor as a share of recent busy time; left out if that is 0.
        - slowness: recent busy time relative to its predicted time, if that is at least
          LEAST_EXPECTED_S.
        """
        # First, account for the time up to now.
        if self._is_idle:
            self._pass_idle(now_s)
        elif not is_running:
            self._pass_gap(now_s)
        if now_s - self._later_s >= WINDOW_S:
            self._start_window(now_s)
        # Then compare the sums with those of a few seconds ago.
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
        """Account for idle time; of a long pause, only the last WINDOW_S seconds count as
        recent."""
        early_s = now_s - WINDOW_S - self._until_s
        if early_s > 0:
            self.idle_s += early_s
            self._until_s += early_s
            self._earlier = self._later = self._sums()
            self._later_s = self._until_s
        self.idle_s += now_s - self._until_s
        self._until_s = now_s

    def _start_window(self, now_s: float) -> None:
        self._earlier, self._later, self._later_s = self._later, self._sums(), now_s


def in_short(utilization: dict[str, Any]) -> str:
    """The recent shares, for a log line."""
    text = f"busy {100 * utilization['busy_share']:.1f}%"
    if "floor_share" in utilization:
        text += f" at {100 * utilization['floor_share']:.0f}% of the machine's rates"
    return text
