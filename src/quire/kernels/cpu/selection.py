"""Chooses the kernels of an engine and the threads that run them.

Called by `assembly/build.py`, and by the command line, which shows what would be chosen.
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
    """The kernels of that name, with threads of their own; None: torch's operators serve.

    name: an instruction set of the native library; "auto": the best that the library has for this
        processor, or torch, with a line in the log that says why; "torch".
    num_threads: None: one for each processor that this process may use.
    dtype: of the model; None: one that the library computes with.
    takes_fewer: whether fewer threads will do where the system starts no more, with a line in the
        log; else that is an error.

    Raises ConfigurationError where an instruction set is named that can't serve, and for threads
    that can't be started.
    """
    if name == TORCH:
        logger.info("kernels: torch, as asked for")
        return None
    wanted = num_threads or usable_processors()
    try:
        if dtype is not None and dtype not in DTYPES:
            known = " and ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise NativeUnavailableError(f"the native kernels compute in {known}, not in {dtype}")
        isa = None if name == AUTO else name
        kernels = NativeKernels(load_library(), isa, wanted, takes_fewer=takes_fewer)
    except NativeUnavailableError as error:
        if name != AUTO:
            raise ConfigurationError(f"kernels={name!r} can't be had: {error}") from error
        logger.warning("kernels: torch, which is slower, since %s", error)
        return None
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
    """What "auto" would choose here and why, and the versions below, in lines for people."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    try:
        library = load_library()
    except NativeUnavailableError as error:
        return f"{versions}\nkernels: torch, since {error}"
    best, *others = library.isas()
    beside = f"; also there: {', '.join(others)}" if others else ""
    return f"{versions}\nkernels: {best}, {usable_processors()} threads{beside}"


def settle_torch_threads(kernels: NativeKernels | None, num_threads: int | None) -> None:
    """Hold torch to one thread beside native kernels, whose threads would else fight with torch's
    for the processors. Without them torch gets num_threads; None: as many as it started with, but
    no more than the processors that this process may use: torch knows no control groups.

    torch knows one number for the whole process, so the last engine that was built decides.
    """
    own = min(_torch_threads_at_start(), usable_processors())
    wanted = 1 if kernels is not None else num_threads or own
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@cache
def _torch_threads_at_start() -> int:
    """What the process was started with, before an engine held torch to one thread."""
    return torch.get_num_threads()
