"""Reads which GPUs a machine has, and whether they are usable.

For `quire doctor`. Only looks, as `machine`, which calls it: what it means is said in `findings`.
"""

import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 5.0
_QUERY = "name,memory.total,memory.used,driver_version"


@dataclass(frozen=True, slots=True)
class Gpu:
    """As the driver reports it; used_bytes: of all programs that run now."""

    name: str
    memory_bytes: int
    used_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class GpuSoftware:
    """What would compute on GPUs.

    cuda: the version that torch was built with, None: without any. num_usable: GPUs that torch can
    use. capabilities: of these, as (9, 0). triton, flashinfer: installed versions. obstacle: why
    Triton's kernels can't run there; None: they can, or there is nothing to run them on.
    """

    cuda: str | None = None
    num_usable: int = 0
    capabilities: tuple[tuple[int, int], ...] = ()
    triton: str | None = None
    flashinfer: str | None = None
    obstacle: str | None = None


def read_gpus() -> tuple[Gpu, ...]:
    """As nvidia-smi lists them; none where there is no driver."""
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
    """Imports torch, and reads from its CUDA part where there is one."""
    import torch  # a second, and `doctor` has found out before that it is there

    from quire.kernels.triton.support import why_not  # brings torch

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
    """ "NVIDIA H200, 143771, 512, 580.159.03": sizes in MiB, or "[N/A]" where they are unknown."""
    name, total, used, driver = (part.strip() for part in line.rsplit(",", 3))
    return Gpu(name, _mib(total), _mib(used), driver)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
