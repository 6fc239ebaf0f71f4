"""Explains failures when the process has too little memory or can't start more threads.

In both cases torch and numpy fail in many ways: a library can't be mapped, a MemoryError has no
message, or C++ aborts, which nothing can catch. So a limit of the address space (`ulimit -v`) that
is far too low is refused before torch and numpy are imported. This module imports neither. Called
by the command line and by the engine's process.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import InsufficientMemoryError

LEAST_BYTES = 800 << 20
"""Address space that torch for the CPU and numpy map before they compute anything (torch 2.13,
Linux). torch for GPUs maps several times as much."""

_FAILURES = ("failed to map segment", "cannot allocate memory")
_THREAD_FAILURE = "can't start new thread"

NO_MORE_THREADS = (
    "the system starts no more threads for this process (a limit of processes: see `ulimit -u`, and"
    " pids.max of the control group); raise the limit, or give a lower num_threads"
)


@contextmanager
def named_memory_failures() -> Iterator[None]:
    """Raise InsufficientMemoryError for failed imports, MemoryErrors and failed thread starts.

    Also raises it before the body runs if the limit of the address space is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        raise InsufficientMemoryError(_sentence(limit))
    try:
        yield
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        text = str(error).lower()
        if _THREAD_FAILURE in text and limit == resource.RLIM_INFINITY:
            raise InsufficientMemoryError(NO_MORE_THREADS) from error
        failures = (*_FAILURES, _THREAD_FAILURE)  # a thread's stack needs address space
        if not isinstance(error, MemoryError) and not any(each in text for each in failures):
            raise
        raise InsufficientMemoryError(_sentence(limit)) from error


def _sentence(limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "memory ran out; free some of it, or choose a smaller model or smaller sizes"
    return (
        f"the address space of this process is limited to {limit} bytes (`ulimit -v`), too little "
        f"for torch, which takes {LEAST_BYTES} bytes and more beside the model and its KV cache; "
        "raise the limit, or lift it with `ulimit -v unlimited`"
    )
