"""What calls of torch the GPU's side makes, with a record in place of the device.

Whether a GPU does what they say is for `benchmarks/gpu.py`, which compares every byte.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.errors import InsufficientMemoryError
from quire.tiers.host.cuda_lanes import CudaLane, page_locked

DEVICE = torch.device("cuda", 0)


class Record:
    """In the place of `torch.cuda`: what was called, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_over = False
        self.register_result = 0
        record = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: "Stream") -> None:
                record.calls.append(("record", stream.name))

            def query(self) -> bool:
                return record.is_over

            def elapsed_time(self, other: "Event") -> float:
                assert other is not self
                return 3.0

        class Stream:
            def __init__(self, device: torch.device, name: str = "own") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                record.calls.append(("wait for", other.name))

            def synchronize(self) -> None:
                record.calls.append("synchronize")

        self.Event, self.Stream = Event, Stream

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream(device, "steps")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(("on", stream.name))
        yield
        self.calls.append("off")

    def cudart(self) -> "Record":
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("lock", address, num_bytes, flags))
        return self.register_result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unlock", address))
        return 0

    def check_error(self, result: int) -> None:
        if result:
            raise RuntimeError(f"error {result}")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    found = Record()
    for name in ("Event", "Stream", "current_stream", "device", "stream", "cudart", "check_error"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def test_a_store_waits_for_the_steps_and_a_load_for_nothing(record: Record) -> None:
    lane = CudaLane(DEVICE)
    copies = []
    for is_after_steps in (True, False):
        with lane.queue(is_after_steps=is_after_steps):
            lane.begin()
            record.calls.append("copy")
            copies.append(lane.end())
    queued = [("on", "own"), ("record", "own"), "copy", ("record", "own"), "off"]
    assert record.calls == [("wait for", "steps"), *queued, *queued]
    assert not copies[0].is_over()
    record.is_over = True
    assert copies[0].is_over() and copies[0].seconds == 0.003
    lane.synchronize()
    assert record.calls[-1] == "synchronize"


def test_memory_is_locked_as_it_is_and_unlocked_once_more(record: Record) -> None:
    memory, unlock = page_locked(3 * 4096 + 64, DEVICE)
    assert memory.shape == (3 * 4096 + 64,) and memory.dtype == torch.uint8 and not memory.any()
    memory[7] = 9
    assert memory.view(-1, 64).numpy()[0, 7] == 9
    unlock()
    address = memory.data_ptr()
    assert record.calls == [("lock", address, 3 * 4096 + 64, 0), ("unlock", address)]


def test_too_little_memory_names_the_option(record: Record) -> None:
    record.register_result = 2
    with pytest.raises(InsufficientMemoryError, match=r"page-locked .* lower host_cache_size"):
        page_locked(4096, DEVICE)
    with pytest.raises(InsufficientMemoryError, match="lower host_cache_size"):
        page_locked(1 << 60, DEVICE)
