"""A GPU's memory as the driver and torch's allocator count it.

Called by `assembly.device_memory_plan`.
"""

import gc
import sys

import torch


class CudaMemory:
    """The memory of one GPU. Creates the driver's context on it.

    *Held* memory is memory that this process's allocator took from the driver, in use or not.
    Memory that is neither held nor free is used by other programs, the driver's context, code of
    kernels, and internal data of CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Memory of the whole device.
        self.total_bytes: int = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        """Memory that the driver can still give to any process."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held_bytes(self) -> int:
        """Memory that the allocator holds now."""
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        """The peak memory of the allocator since `release_and_reset_peak`."""
        return torch.cuda.max_memory_reserved(self._device)

    def release_and_reset_peak(self) -> None:
        """Wait for the device, return unused memory to the driver, and reset the peak."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # free tensors in reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch, the CUDA driver or its libraries says that a device or the
    machine has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def excess_of_kernel(error: BaseException) -> str | None:
    """A clause that names the limit of the GPU which a Triton kernel exceeds; None for other
    errors."""
    errors = sys.modules.get("triton.runtime.errors")  # loaded with the first kernel
    if errors is None or not isinstance(error, errors.OutOfResources):
        return None
    return f"a kernel needs {error.required} of {error.name}, and the GPU has {error.limit}"
