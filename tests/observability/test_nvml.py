"""The driver's figures are renewed by a thread, and their absence is no error."""

import gc
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from quire.observability import nvml


class NVMLError(Exception):
    pass


class Driver:
    """Stands for pynvml: one GPU."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.gpu = 50
        self.num_reads = 0
        self.refuses = False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVML's name
        if uuid != "GPU-1":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802 - NVML's name
        self.num_reads += 1
        if self.refuses:
            raise NVMLError("Unknown Error")
        return SimpleNamespace(gpu=self.gpu, memory=self.gpu // 2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(nvml, "INTERVAL_S", 0.01)
    return found


def wait_for(holds) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.002)


def test_the_last_reading_is_there_at_once_and_renewed(driver: Driver) -> None:
    readings = nvml.watch("GPU-1")
    assert readings is not None
    assert readings.read() == {"busy_share": 0.5, "memory_share": 0.25}
    driver.gpu = 100
    wait_for(lambda: readings.read() == {"busy_share": 1.0, "memory_share": 0.5})
    driver.refuses = True
    wait_for(lambda: readings.read() == {})
    driver.refuses = False
    wait_for(lambda: readings.read() != {})


def test_the_thread_ends_with_its_owner(driver: Driver) -> None:
    others = set(threading.enumerate())  # of another test, which end when they are collected
    readings = nvml.watch("GPU-1")
    (thread,) = set(threading.enumerate()) - others
    del readings
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_unreadable_gpus_are_not_watched(driver: Driver, monkeypatch) -> None:
    assert nvml.watch("GPU-2") is None
    driver.refuses = True
    assert nvml.watch("GPU-1") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert nvml.watch("GPU-1") is None
