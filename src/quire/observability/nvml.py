"""Reads what NVIDIA's driver says of a GPU's use, once a second, beside the steps.

Needs the package nvidia-ml-py; without it, without a driver or where the driver does not say (a
part of a GPU, as by MIG), there is nothing to read. A thread asks the driver, which may take
milliseconds, so nobody waits for it. Knows no engine.
"""

import threading
import weakref
from typing import Any

from quire.observability.log import get_logger

INTERVAL_S = 1.0

logger = get_logger(__name__)


class GpuReadings:
    """The last reading of one GPU. The thread that renews it ends with this object."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """nvml: the module, initialised. handle: its own, of the GPU. Raises its NVMLError."""
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
        """busy_share: of the driver's last sampling period (up to a second), the part in which some
        kernel ran; memory_share: in which memory was read or written. Does not wait."""
        return dict(self._last)


def watch(uuid: str) -> GpuReadings | None:
    """Of the GPU with this UUID, as "GPU-...". None where nothing can be read."""
    try:
        import pynvml as nvml  # optional, and of use on a GPU only
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return GpuReadings(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        logger.info("the driver does not say how busy GPU %s is (%s)", uuid, error)
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
            found = {}  # the GPU has gone, or the driver is being replaced
        readings = owner()
        if readings is not None:
            readings._last = found
        del readings
