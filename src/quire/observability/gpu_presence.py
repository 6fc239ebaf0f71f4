"""Says whether torch can see a GPU at all, without importing torch.

It finds the frequent reasons why there is none: a torch without CUDA, and a machine without a
driver. torch itself decides about the rest when an engine starts.
"""

import ctypes
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "libcuda.so.1"
_NO_CUDA = "cuda: Optional[str] = None"
_NO_ROCM = "hip: Optional[str] = None"


def lacks_gpu() -> bool:
    """True if torch was built for the CPU alone, or if this machine has no driver of a GPU."""
    built = _build_text()
    if _NO_CUDA in built:
        return _NO_ROCM in built  # a build for ROCm has another driver, which torch looks for
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return True
    return False


def torch_version() -> str:
    """The version of the installed torch, such as "2.13.0+cpu"."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(which is not installed)"


def _build_text() -> str:
    """The module in which torch's build states what it was made for; empty if there is none."""
    found = find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / "version.py"
        if path.is_file():
            return path.read_text()
    return ""
