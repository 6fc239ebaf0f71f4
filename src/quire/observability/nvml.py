"""Reads a GPU's utilization from NVIDIA's driver once a second, in a thread.

It needs the package nvidia-ml-py and a driver. For a part of a GPU (MIG), the driver reports no
utilization. A query may take milliseconds; only this thread waits for it.
"""

import threading
import weakref
from typing import Any

from quire.observability.log import get_logger

INTERVAL_S = 1.0

logger = get_logger(__name__)


class GpuReadings:
    """The last reading of one GPU. Its thread ends when this object is deleted."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the initialized module. `handle` is its handle of the GPU. Raises NVMLError."""
        self._last = _read(nvml, handle)
        self._ended = threading.Event()
        weakref.finalize(self, self._ended.set)
        thread = threading.Thread(
            target=_renew,
            args=(weakref.ref(self), nvml, handle, self._ended),
            name="quire-nvml",
            daemon=True,
        )
        thread.start()

    def read(self) -> dict[str, float]:
        """The last reading, without waiting.

        busy_share is the share of the driver's last sampling period (up to a second) in which a
        kernel ran. memory_share is the share of that period in which memory was read or written.
        """
        return dict(self._last)


def watch(uuid: str) -> GpuReadings | None:
    """Start reading the GPU with this UUID ("GPU-..."). Returns None if that is not possible."""
    try:
        import pynvml as nvml  # optional, and only useful on a GPU
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return GpuReadings(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        logger.info("the driver does not report how busy GPU %s is (%s)", uuid, error)
        return None


def _read(nvml: Any, handle: Any) -> dict[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)  # in percent
    return {"busy_share": rates.gpu / 100, "memory_share": rates.memory / 100}


def _renew(
    owner: "weakref.ref[GpuReadings]", nvml: Any, handle: Any, ended: threading.Event
) -> None:
    while not ended.wait(INTERVAL_S):
        try:
            found = _read(nvml, handle)
        except nvml.NVMLError:
            found = {}  # the GPU was removed, or the driver is being replaced
        readings = owner()
        if readings is not None:
            readings._last = found
        del readings
