"""GPU parts of the host tier: streams, events, and page-locked memory.

All calls except `unlock` and `synchronize` return at once. They come from the engine's thread,
which also captures graphs, so no call falls into a capture.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from quire.errors import InsufficientMemoryError

HUGE_PAGE_BYTES = 2 << 20


class CudaCopy:
    """See `staged_copies.Copy`. Two events of a stream, before and after the copy."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def is_over(self) -> bool:
        """Raises the error of a device that can't go on, as every later call would."""
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class CudaLane:
    """See `staged_copies.Lane`. A stream of its own.

    A store waits for an event of the steps' stream, recorded when the store is queued. The block
    pool requests a store only after the result of the step that wrote the block has come, so that
    step precedes the event. Later steps don't write to the block; waiting for them is needless, but
    lasts for one step at most.

    A load waits for nothing. Its blocks were free, and a block that a step in flight accesses is
    not free until the result of that step has come. The steps don't wait for loads either: the
    blocks are in no table until `CudaCopy.is_over` returns True, so steps that read them are
    launched after the copy has ended.
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
        assert self._began is not None, "a copy ends that has not begun"
        return CudaCopy(self._began, self._record())

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def page_locked(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Zeroed host memory that a GPU can access by itself, [num_bytes] uint8, and a function that
    unlocks it. After unlocking, the GPU must not use it.

    `pin_memory=True` is not used, since it rounds up to a power of two. Raises
    InsufficientMemoryError.
    """
    try:
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise _too_little(num_bytes) from error
    # Otherwise a write after a fork would copy a page, and the locked page would keep the old
    # bytes.
    area.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages only takes longer for page-locking
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
        f"{num_bytes / 2**30:.2f} GiB of the host's memory can't be page-locked for the tier behind"
        " the KV cache; lower host_cache_size"
    )
