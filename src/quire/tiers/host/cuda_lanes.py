"""CUDA streams, events and page-locked memory for the host tier's copies.

No call blocks, except `page_locked`, `unlock` and `synchronize`. All calls come from the engine's
thread, which also captures CUDA graphs, so no call falls into a capture.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from quire.errors import InsufficientMemoryError

HUGE_PAGE_BYTES = 2 << 20


class CudaCopy:
    """A `staged_copies.Copy`: two events of a stream, before and after the copy."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def is_over(self) -> bool:
        """True once the copy has ended. Raises the CUDA error if the device has failed."""
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class CudaLane:
    """A `staged_copies.Lane` that uses its own CUDA stream.

    A store waits for an event of the steps' stream, recorded when the store is queued. The block
    pool requests a store only after it has the result of the step that wrote the block, so that
    step precedes the event. The store also waits for later steps in the stream, which do not write
    to the block; this costs one step at most.

    A load does not wait. Its blocks were free, and a block that a step in flight accesses becomes
    free only after the result of that step has come. Nor do steps wait for loads: a block enters a
    block table only after `CudaCopy.is_over` returns True, so steps that read it are launched after
    the copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._began: torch.cuda.Event | None = None

    @contextmanager
    def queue(self, *, is_after_steps: bool) -> Iterator[None]:
        with torch.cuda.device(self._device):
            if is_after_steps:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield

    def begin(self) -> None:
        self._began = self._record()

    def end(self) -> CudaCopy:
        assert self._began is not None, "end() was called without begin()"
        return CudaCopy(self._began, self._record())

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def page_locked(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Zeroed page-locked host memory, [num_bytes] uint8, which the GPU can access directly, and a
    function that unlocks it. After unlocking, the GPU must not use it.

    `pin_memory=True` is not used, since it rounds the size up to a power of two. Raises
    InsufficientMemoryError.
    """
    try:
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise _too_little(num_bytes) from error
    # Do not share the pages with forked processes: after a fork, a write would copy a page, and the
    # GPU would still read the old page.
    area.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # without huge pages, page-locking only takes longer
            area.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        except RuntimeError as error:
            raise _too_little(num_bytes) from error

    def unlock() -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

    return memory, unlock


def _too_little(num_bytes: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"{num_bytes / 2**30:.2f} GiB of host memory can't be page-locked for the tier behind"
        " the KV cache; lower host_cache_size"
    )
