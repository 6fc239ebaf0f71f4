"""Shared by Triton kernels: availability, sizes and checks of tensors.

Loads where Triton is missing, so that its availability can be checked anywhere. Called by
the kernels' wrappers, the registries that offer them, and `doctor`.
"""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch

VECTOR_BYTES = 16
"""What one thread loads at once: kernels want rows that begin at multiples of it."""


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1).

    Settled for good when a kernel's file is first imported.
    """
    from triton import knobs  # slow to load, and may be missing

    return bool(knobs.runtime.interpret)


def why_not(device_type: str) -> str | None:
    """Why the kernels can't serve tensors on such a device ("cpu", "cuda"); None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA, or: pip install triton"
    if device_type == "cpu":
        if is_interpreting():
            return None
        return "on the CPU only Triton's interpreter runs them, as a check: set TRITON_INTERPRET=1"
    if device_type != "cuda":
        return f"they serve cuda devices, not {device_type!r}"
    if is_interpreting():
        return "TRITON_INTERPRET is set, and the interpreter serves the CPU alone; unset it"
    return _why_not_launched()


def _why_not_launched() -> str | None:
    """Triton compiles kernels by itself, but as of 3.7 the C code that calls the driver with what
    the system has, against Python's headers."""
    from triton import knobs  # slow to load

    if not (knobs.build.cc or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for what launches them; install gcc or clang, or set CC"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's headers for what launches them, but {header} is missing"
    return None


def next_power_of_two(count: int) -> int:
    """The smallest power of two >= count, for count >= 1: extents of Triton's tiles."""
    assert count >= 1
    return 1 << (count - 1).bit_length()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [R, D] whose rows lie anywhere and whose elements lie side by side: a view, where
    the leading dimensions lie evenly, as those of a fused linear's parts do."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_same(name: str, tensor: torch.Tensor, like: str, other: torch.Tensor) -> None:
    """Raises ValueError unless both have one dtype and lie on one device."""
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but must be as {like}, {other.dtype} on "
            f"{other.device}"
        )
