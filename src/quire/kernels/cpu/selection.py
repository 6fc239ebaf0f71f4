"""Chooses the kernels of an engine and the threads that run them.

Called by `assembly`, and by the command line, which prints the choice.
"""

import platform
from functools import cache

import torch

from quire.errors import ConfigurationError
from quire.kernels.cpu.abi import DTYPES
from quire.kernels.cpu.library import (
    NativeKernels,
    NativeUnavailableError,
    load_library,
)
from quire.observability.log import get_logger
from quire.observability.machine_processors import usable_processors

AUTO, TORCH = "auto", "torch"

logger = get_logger(__name__)


def select_kernels(
    name: str,
    num_threads: int | None,
    dtype: torch.dtype | None = None,
    *,
    takes_fewer: bool = False,
) -> NativeKernels | None:
    """The kernels called `name`, with threads of their own; None if torch computes.

    `name` is an instruction set of the native library, "torch" or "auto". "auto" is the best
    instruction set for this processor, or torch, and the log says why. `num_threads` is by default
    the number of processors that this process may use. `dtype` is the model's dtype; None means any
    dtype that the library supports. `takes_fewer` allows fewer threads, with a warning, if the
    system can't start as many. Raises ConfigurationError if the named instruction set can't be used
    or threads can't be started.
    """
    # First, the cases in which torch computes.
    if name == TORCH:
        logger.info("kernels: torch, as requested")
        return None
    # Then, the native kernels, with as many threads as can be started.
    wanted = num_threads or usable_processors()
    try:
        if dtype is not None and dtype not in DTYPES:
            known = " and ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise NativeUnavailableError(f"the native kernels compute in {known}, not in {dtype}")
        isa = None if name == AUTO else name
        kernels = NativeKernels(load_library(), isa, wanted, takes_fewer=takes_fewer)
    except NativeUnavailableError as error:
        if name != AUTO:
            raise ConfigurationError(f"kernels={name!r} can't be used: {error}") from error
        logger.warning("kernels: torch, which is slower, since %s", error)
        return None
    # Last, the log of the choice.
    if kernels.num_threads < wanted:
        logger.warning(
            "kernels: %d of %d threads, since the system starts no more (a limit of processes or of"
            " address space: see `ulimit -u`, `ulimit -v`, and pids.max of the control group)",
            kernels.num_threads,
            wanted,
        )
    logger.info("kernels: %s, num_threads=%d", kernels.isa, kernels.num_threads)
    return kernels


def describe_kernels() -> str:
    """Text with the versions, the choice of "auto" on this machine, and its reason."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    try:
        library = load_library()
    except NativeUnavailableError as error:
        return f"{versions}\nkernels: torch, since {error}"
    best, *others = library.isas()
    beside = f"; also there: {', '.join(others)}" if others else ""
    slow = library.isas_for_tests()
    note = f"; compiled for tests, so slow: {', '.join(slow)}" if slow else ""
    return f"{versions}\nkernels: {best}, {usable_processors()} threads{beside}{note}"


def set_torch_threads(kernels: NativeKernels | None, num_threads: int | None) -> None:
    """Set torch's number of threads: one if there are native kernels, since torch's threads would
    compete with theirs.

    Otherwise it is `num_threads`. The default is the number that torch started with, limited to the
    processors that this process may use, since torch ignores control groups. The number applies to
    the whole process, so the engine that was built last decides.
    """
    own = min(_torch_threads_at_start(), usable_processors())
    wanted = 1 if kernels is not None else num_threads or own
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@cache
def _torch_threads_at_start() -> int:
    """torch's number of threads at the first call, before an engine limits it."""
    return torch.get_num_threads()
