"""Helpers of the Triton kernels: availability, sizes and checks of tensors.

It can be imported without Triton, so that availability can be checked on any machine. Called by the
kernels' wrappers, the registries that offer them, and the command `doctor`.
"""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch

#: The number of bytes that one thread loads at once. Rows begin at multiples of it.
VECTOR_BYTES = 16


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1).

    Importing a kernel's file fixes the answer for the process.
    """
    from triton import knobs  # slow to load, and may be missing

    return bool(knobs.runtime.interpret)


def why_not(device_type: str) -> str | None:
    """The reason why the kernels can't serve a device type ("cpu", "cuda"); None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA, or: pip install triton"
    if device_type == "cpu":
        if is_interpreting():
            return None
        return "the CPU runs them only in Triton's interpreter, as a check: set TRITON_INTERPRET=1"
    if device_type != "cuda":
        return f"they serve cuda devices, not {device_type!r}"
    if is_interpreting():
        return "TRITON_INTERPRET is set, and the interpreter serves the CPU alone; unset it"
    return _why_not_launched()


def _why_not_launched() -> str | None:
    """The reason why Triton can't launch kernels here; None if it can. As of 3.7 it compiles C code
    that calls the driver, with the system's compiler and Python's headers."""
    from triton import knobs  # slow to load

    if not (knobs.build.cc or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler to build its launchers; install gcc or clang, or set CC"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's headers to build its launchers, but {header} is missing"
    return None


def next_power_of_two(count: int) -> int:
    """The smallest power of two >= count, for count >= 1: Triton's tiles have such extents."""
    assert count >= 1
    return 1 << (count - 1).bit_length()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [R, D] with contiguous elements and any stride of rows. It is a view if the
    leading dimensions have one common stride, as in a part of a fused linear's output."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_same(name: str, tensor: torch.Tensor, like: str, other: torch.Tensor) -> None:
    """Raises ValueError unless both tensors have the same dtype and device."""
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, but must be as {like}, {other.dtype} on "
            f"{other.device}"
        )
