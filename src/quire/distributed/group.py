"""Collectives between the processes that compute one model together.

Every rank makes the same calls in the same order: a call returns once all ranks have made it, and
raises where one of them is gone. Tensors travel through torch.distributed's own backends, NCCL
between GPUs and gloo between processes of one machine, made here without torch's global group: a
program that embeds the engine may have one of its own.

Knows no layers and no plans. Made by `engine`; used by `layers.sharded`.

Shapes: N ranks, ... any.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

COLLECTIVE_TIMEOUT_S = 300.0
"""A rank that is gone is noticed at once, its connections being closed; this bounds what hangs."""

_c10d: Any = distributed  # torch's stubs leave out most of what is used here


class RankGroup(Protocol):
    """The group as one of its ranks sees it. rank: from 0. size: N."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of each rank -> their sum, equal on all ranks to the bit; may overwrite x."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of each rank, all of one shape -> [N, ...]."""
        ...

    def least(self, value: int) -> int:
        """The least of what the ranks give. Waits for the device."""
        ...


class ProcessGroup:
    """A `RankGroup` over torch.distributed; keep it as long as there are steps.

    On the CPU, and with fixed_order, a sum adds the ranks' parts in the order of the
    ranks: a backend's own sum may add in another order for another number of elements, and then a
    token would depend on how many are computed beside it. Two parts have only one order.
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
        """Waits for all ranks. rendezvous: a file that is not there yet, which they find each
        other by, in a folder that lasts as long as they do. device: this rank's own.

        Raises RuntimeError where a rank does not come.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._is_ordered = device.type == "cpu" or (fixed_order and size > 2)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = _c10d.FileStore(str(rendezvous), size)
        connect = _gloo if device.type == "cpu" else _nccl
        self._backend = connect(store, rank, size, timeout)
        # On the stream that computes, not beside it.
        self._sum_options = _c10d.AllreduceOptions()
        self._gather_options = _c10d.distributed_c10d.AllgatherOptions()
        self._sum_options.asyncOp = self._gather_options.asyncOp = False
        self.least(0)  # some backends connect at the first call

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `RankGroup`."""
        if not self._is_ordered:
            x = x.contiguous()
            _finish(self._backend.allreduce([x], self._sum_options))
            return x
        total, *others = self.gather(x).unbind()
        for part in others:
            total += part
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `RankGroup`."""
        flat = x.reshape(1, -1)
        parts = torch.empty((self.size, flat.shape[1]), dtype=x.dtype, device=x.device)
        _finish(self._backend._allgather_base(parts, flat.contiguous(), self._gather_options))
        return parts.view(self.size, *x.shape)

    def least(self, value: int) -> int:
        """See `RankGroup`."""
        return int(self.gather(torch.tensor([value], device=self._device)).min())

    def abort(self) -> None:
        """Let go of a call that waits for a rank that is gone; from any thread, once, at the end.

        For NCCL, whose calls would wait until their timeout; gloo's have ended by themselves.
        """
        if self._device.type != "cpu":
            self._backend.abort()


def _finish(work: Any) -> None:
    """NCCL gives nothing to wait for where the call goes into the stream that computes."""
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
