"""Who else is busy: measured, and unknown where the system does not say."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.bench import machine
from quire.bench.machine import Noise, NoiseMeter, processor

# Ends by itself where no test ends it.
SPIN = """
import time
print(flush=True)
while time.process_time() < 60:
    pass
"""


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _numbers(monkeypatch: pytest.MonkeyPatch, machine_s: list[float], own_s: list[float]) -> None:
    """Make the clocks say these values, one a call."""
    values = iter(machine_s)
    monkeypatch.setattr(machine, "_machine_times_s", lambda: (next(values), 0.0))
    owns = iter(own_s)
    monkeypatch.setattr(machine, "_own_time_s", lambda: next(owns))
    times = iter([100.0, 102.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(times))


def test_other_cores_exclude_our_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _numbers(monkeypatch, machine_s=[50.0, 53.0], own_s=[1.0, 3.0])
    noise = NoiseMeter().stop()
    assert noise.other_cores == pytest.approx((3.0 - 2.0) / 2.0)
    assert noise.is_loud


def test_our_own_work_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    _numbers(monkeypatch, machine_s=[50.0, 53.0], own_s=[1.0, 4.1])
    noise = NoiseMeter().stop()
    assert noise.other_cores == 0.0  # clock ticks are coarse: never below zero
    assert not noise.is_loud


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")
def test_a_busy_neighbour_is_heard() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()  # it has begun
        meter = NoiseMeter()
        _spin(0.3)
        noise = meter.stop()
        neighbour.kill()
    assert noise.other_cores is not None and noise.other_cores > 0.1


def test_without_proc_the_noise_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_PROC_STAT", tmp_path / "none")
    noise = NoiseMeter().stop()
    assert noise == Noise(None, None)
    assert not noise.is_loud


def test_the_processor_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    monkeypatch.setattr(machine, "_PROC_CPUINFO", cpuinfo)
    assert processor().startswith("Example 9000, ")
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    assert ", implementer 0x41, part 0xd4f, " in processor()
    monkeypatch.setattr(machine, "_PROC_CPUINFO", tmp_path / "none")
    assert processor().endswith(" cores")
