"""Reads which GPUs a machine has, and whether they are usable.

For `quire doctor`. Called by `machine`; `findings` interprets the results.
"""

import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 5.0
_QUERY = "name,memory.total,memory.used,driver_version"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver reports it."""

    name: str
    memory_bytes: int
    #: The memory that all running programs use.
    used_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class GpuSoftware:
    """The software for computing on GPUs. Versions of missing packages are None."""

    #: The version of CUDA that torch was built with; None if it was built without CUDA.
    cuda: str | None = None
    #: The number of GPUs that torch can use.
    num_usable: int = 0
    #: The compute capability of each usable GPU, such as (9, 0).
    capabilities: tuple[tuple[int, int], ...] = ()
    triton: str | None = None
    flashinfer: str | None = None
    #: The reason why Triton's kernels can't run; None if they can, or if no GPU is usable.
    obstacle: str | None = None


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return tuple(_gpu(line) for line in lines)


def read_gpu_software() -> GpuSoftware:
    """Read the software's versions and the usable GPUs. Imports torch, which must be installed."""
    import torch  # takes a second, and the caller has checked that it can be imported

    from quire.kernels.triton.support import why_not  # imports torch

    num_usable = torch.cuda.device_count()
    return GpuSoftware(
        torch.version.cuda,
        num_usable,
        tuple(torch.cuda.get_device_capability(index) for index in range(num_usable)),
        _version("triton"),
        _version("flashinfer-python"),
        why_not("cuda") if num_usable else None,
    )


def _gpu(line: str) -> Gpu:
    """Parse "NVIDIA H200, 143771, 512, 580.159.03". Sizes are in MiB, or "[N/A]" if unknown."""
    name, total, used, driver = (part.strip() for part in line.rsplit(",", 3))
    return Gpu(name, _mib(total), _mib(used), driver)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
