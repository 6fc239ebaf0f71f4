"""Asynchronous copies between the host and one device.

Only `Download.wait` and `DeviceLink.fetch` wait for a copy. On the CPU, uploads and downloads are
plain copies. On a GPU they go through page-locked memory, which torch's allocator reuses only when
the stream has finished the copy. Uploads run in parallel with earlier work on the device, and later
work waits for them. Downloads run in the order of the current stream.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Download:
    """A copy to the host that may still be running."""

    def __init__(self, values: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._values = values
        self._event = event

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy. Returns the values as they were when it was queued."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: npt.NDArray[Any] = self._values.numpy()
        return values


def current(device: torch.device) -> AbstractContextManager[None]:
    """A context in which launches go to `device`, since each thread has its own current GPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of uploads, on which they don't wait for the running step."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceLink:
    """Copies in both directions between the host and `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A copy on the device. `values` may be changed when the call returns."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.array(values, order="C"))
        found = torch.empty(values.shape, dtype=_torch_dtype(values.dtype), pin_memory=True)
        found.numpy()[...] = values
        uploads, current = _upload_stream(self.device), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(uploads):
            sent = found.to(self.device, non_blocking=True)
        current.wait_stream(uploads)
        sent.record_stream(current)  # else the next upload could reuse the memory before it is read
        return sent

    def upload_into(self, target: torch.Tensor, values: npt.NDArray[Any]) -> None:
        """Like `upload`, but overwrites `target`, after all queued work that may read it."""
        target.copy_(self.upload(values))

    def synchronize(self) -> None:
        """Wait until all queued work is done. Raises the device's errors."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def download(self, values: torch.Tensor) -> Download:
        """Start a copy to the host. Later writes to `values` don't change it."""
        if self.device.type == "cpu":
            return Download(values.clone(), None)
        found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        found.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Download(found, event)

    def fetch(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Wait for queued work that writes these tensors, and return them in the host's memory. On
        the CPU they are returned themselves."""
        if self.device.type == "cpu":
            return tensors
        found = tuple(
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors
        )
        for target, each in zip(found, tensors, strict=True):
            target.copy_(each, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return found

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor in the host's memory, which may be changed when the call
        returns. Later work of the current stream waits for it. On the CPU, the tensor itself."""
        if self.device.type == "cpu":
            return tensor
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        return staged.to(self.device, non_blocking=True)
