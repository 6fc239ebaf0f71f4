"""What of the host tier needs a GPU: streams, events, and page-locked memory.

Whatever is called here, `free` and `synchronize` aside, returns at once. All of it is called from
the engine's thread, which also captures graphs: so no call of ours falls into a capture.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from quire.errors import InsufficientMemoryError

HUGE_PAGE_BYTES = 2 << 20


class CudaCopy:
    """See `copies.Copy`: two events of a stream, the second behind the copy."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def is_over(self) -> bool:
        """Raises what the device raises if it can't go on, as every later call would."""
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class CudaLane:
    """See `staged_copies.Lane`: a stream of its own.

    A store waits for an event of the steps' stream, recorded when it is queued. The memory orders
    it once the result of the step that wrote the block has come, so the event has the step before
    it; those that were launched since don't write to the block, and are waited for needlessly, for
    one step at most.

    A load waits for nothing: its blocks were free, and a block that a step in flight reads or
    writes is not free until the result of that step has come. The steps don't wait for it either:
    its blocks are in no table until `CudaCopy.is_over` has said so, so whatever reads them is
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
    """Memory of the host that a GPU copies from and to by itself, [num_bytes] uint8, zeroed; and
    what unlocks it again, after which the GPU must not use it.

    Not by `pin_memory=True`, which takes the next power of two. Raises InsufficientMemoryError.
    """
    try:
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise _too_little(num_bytes) from error
    # Else a write after a fork would go to another page than the one that is locked.
    area.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel may have none; page-locking then takes longer
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
