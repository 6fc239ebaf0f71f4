"""Describes the machine of a measurement, and the load of other processes.

On a small machine, one other busy process can make a benchmark several times slower. So each
measured run reports how many cores other processes used. Used by `compare` and `report`.
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from quire.observability.machine_processors import usable_processors

# If other processes used more cores than this, the report warns that figures are unreliable.
NOISE_LIMIT_CORES = 0.15

_PROC_STAT = Path("/proc/stat")
_PROC_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Noise:
    """Load of other processes, as mean number of busy cores; None on systems without /proc/stat."""

    #: Cores used by other processes.
    other_cores: float | None
    #: Cores taken by the hypervisor.
    steal_cores: float | None

    @property
    def is_loud(self) -> bool:
        return (self.other_cores or 0.0) + (self.steal_cores or 0.0) > NOISE_LIMIT_CORES


class NoiseMeter:
    """Measures the noise from the meter's construction to `stop`."""

    def __init__(self) -> None:
        self._machine = _machine_times_s()
        self._own_s = _own_time_s()
        self._started_s = time.perf_counter()

    def stop(self) -> Noise:
        """The noise from the meter's construction until now. May be called several times."""
        elapsed_s = time.perf_counter() - self._started_s
        own_s = _own_time_s() - self._own_s
        machine = _machine_times_s()
        if machine is None or self._machine is None:
            return Noise(None, None)
        busy_s = machine[0] - self._machine[0]
        steal_s = machine[1] - self._machine[1]
        return Noise(max(0.0, (busy_s - own_s) / elapsed_s), max(0.0, steal_s / elapsed_s))


def _own_time_s() -> float:
    """CPU time of this process with all its threads, and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _machine_times_s() -> tuple[float, float] | None:
    """(busy, stolen) seconds of all cores since boot."""
    try:
        line = _PROC_STAT.read_text().partition("\n")[0]
    except OSError:
        return None
    # cpu user nice system idle iowait irq softirq steal ...
    ticks = [int(word) for word in line.split()[1:]]
    per_second = os.sysconf("SC_CLK_TCK")
    busy = sum(ticks[:3]) + ticks[5] + ticks[6]
    return busy / per_second, ticks[7] / per_second


def processor() -> str:
    """The processor's name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = _PROC_CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    said = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    if "model name" in said:
        name = said["model name"]
    elif "CPU part" in said:  # an Arm processor
        name = f"{name}, implementer {said.get('CPU implementer')}, part {said['CPU part']}"
    return f"{name}, {usable_processors()} cores"
