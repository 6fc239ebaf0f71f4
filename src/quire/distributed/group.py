"""Collectives between the processes that compute one model together.

All ranks make the same calls in the same order. A call returns once all ranks have made it, and
raises if one of them is gone. Tensors are sent by torch.distributed's backends: NCCL between GPUs,
and gloo between processes of one machine. The backends are created without torch's global group,
because a program that embeds the engine may use that group itself.

Made by `assembly.build` and `runtime.executor`, used by `layers.sharded`.

Shapes: N ranks, ... any.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

COLLECTIVE_TIMEOUT_S = 300.0
"""Bounds the wait for a rank that hangs. A rank that has ended is noticed at once, because its
connections are closed."""

_c10d: Any = distributed  # torch's stubs lack most of the names used here


class ProcessGroup:
    """One rank's connection to the group of N ranks, over torch.distributed.

    The object must exist until the last step has ended.

    On the CPU, and with fixed_order, sums add the ranks' tensors in rank order. A backend's own sum
    may choose the order by the number of elements, so a token could depend on the batch size. Two
    GPUs always use the backend's sum, because a sum of two tensors is the same in either order.
    """

    def __init__(
        self,
        rendezvous: Path,
        rank: int,
        size: int,
        device: torch.device,
        *,
        fixed_order: bool = False,
    ) -> None:
        """Connect, and wait for all ranks.

        rendezvous is the path of a new file by which the ranks find each other. Its folder must
        exist as long as the ranks run. device is the device of this rank. Raises RuntimeError if a
        rank does not connect.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._is_ordered = device.type == "cpu" or (fixed_order and size > 2)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = _c10d.FileStore(str(rendezvous), size)
        connect = _gloo if device.type == "cpu" else _nccl
        self._backend = connect(store, rank, size, timeout)
        # Collectives run on the stream that computes, not on a separate stream.
        self._sum_options = _c10d.AllreduceOptions()
        self._gather_options = _c10d.distributed_c10d.AllgatherOptions()
        self._root_options = _c10d.BroadcastOptions()
        self._sum_options.asyncOp = self._gather_options.asyncOp = False
        self._root_options.rootRank, self._root_options.asyncOp = 0, False
        self.least(0)  # some backends connect at the first call

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [...] over the ranks, bitwise equal on all ranks. It may overwrite x."""
        if not self._is_ordered:
            x = x.contiguous()
            _finish(self._backend.allreduce([x], self._sum_options))
            return x
        total, *others = self.gather(x).unbind()
        for part in others:
            total += part
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The x [...] of all ranks, which must have equal shapes, stacked to [N, ...]."""
        flat = x.reshape(1, -1)
        parts = torch.empty((self.size, flat.shape[1]), dtype=x.dtype, device=x.device)
        _finish(self._backend._allgather_base(parts, flat.contiguous(), self._gather_options))
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x [...] with rank 0's x. It is contiguous, and has equal sizes on all ranks."""
        if x.numel():
            _finish(self._backend.broadcast([x.view(-1).view(torch.uint8)], self._root_options))

    def least(self, value: int) -> int:
        """The minimum of the ranks' values. Waits for the device."""
        return int(self.gather(torch.tensor([value], device=self._device)).min())

    def abort(self) -> None:
        """End a call that waits for a rank which is gone. Called at most once, from any thread.

        NCCL's calls would wait until their timeout; gloo's end by themselves.
        """
        if self._device.type != "cpu":
            self._backend.abort()


def _finish(work: Any) -> None:
    """Wait for a call. NCCL returns None for calls on the stream that computes."""
    if work is not None:
        work.wait()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    # Only this machine may connect, because connections are not authenticated.
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, rank, size, options)
