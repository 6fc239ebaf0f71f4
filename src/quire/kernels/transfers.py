"""Asynchronous copies between the host and one device.

Only reading the result of a download waits for the copy. On the CPU both directions are plain
copies. On a GPU they go through page-locked memory, which torch's allocator reuses only once the
stream of the copy has passed it. Uploads travel while earlier work runs, and what is queued after
them waits for them; downloads are in the order of the current stream.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Download:
    """Values on their way to the host."""

    def __init__(self, values: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._values = values
        self._event = event

    def wait(self) -> npt.NDArray[Any]:
        """The values, as they were when the copy was queued."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: npt.NDArray[Any] = self._values.numpy()
        return values


def current(device: torch.device) -> AbstractContextManager[None]:
    """Launches inside go to `device`: which GPU is the current one, each thread has for itself."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of their own, on which uploads don't wait for the step that is running."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceLink:
    """The two directions between the host and `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A copy on the device, of the same shape and dtype; `values` may be changed afterwards."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.array(values, order="C"))
        found = torch.empty(values.shape, dtype=_torch_dtype(values.dtype), pin_memory=True)
        found.numpy()[...] = values
        uploads, current = _upload_stream(self.device), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(uploads):
            sent = found.to(self.device, non_blocking=True)
        current.wait_stream(uploads)
        sent.record_stream(current)  # else its memory could be the next upload's before it is read
        return sent

    def upload_into(self, target: torch.Tensor, values: npt.NDArray[Any]) -> None:
        """The same into a tensor that stays where it is, once all that was queued has run."""
        target.copy_(self.upload(values))

    def synchronize(self) -> None:
        """Wait until all that was queued has run. Raises what has failed there."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def download(self, values: torch.Tensor) -> Download:
        """Begin to copy; what is written to `values` afterwards is not seen."""
        if self.device.type == "cpu":
            return Download(values.clone(), None)
        found = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        found.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Download(found, event)
