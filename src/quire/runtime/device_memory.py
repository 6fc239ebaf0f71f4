"""A GPU's memory as the driver and torch's allocator count it.

Four readings and one command behind `DeviceMemory`, so that the arithmetic on them is tested
without a GPU. Knows nothing of models and options; `engine/device_sizes` draws the conclusions.
"""

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """One device.

    total_bytes: of the device. What is *held* is what this process's allocator took from the
    driver, in use or not; what is neither held nor free is others': other programs, the driver's
    context, code of kernels, CUDA graphs' own data.
    """

    total_bytes: int

    def free_bytes(self) -> int:
        """What the driver could still give to any process."""
        ...

    def held_bytes(self) -> int:
        """What the allocator holds now."""
        ...

    def peak_bytes(self) -> int:
        """The most that it held since `settle`."""
        ...

    def settle(self) -> None:
        """Wait for the device, give back what is unused, and begin the peak anew."""
        ...


class CudaMemory:
    """`DeviceMemory` of a GPU. Creates the driver's context on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes: int = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()  # tensors in cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left: Python's, torch's,
    the CUDA driver's and its libraries' words for it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
