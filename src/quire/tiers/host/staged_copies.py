"""Copies between a device's pool and the host's slots, through a staging area.

The staging area lies on the device.

    store   pool blocks, anywhere  --gather-->   staging  --one copy a run-->  slots, in runs
    load    slots, in runs  --one copy a run-->  staging  --scatter-->   pool blocks, anywhere

Blocks of a prefix lie anywhere in the pool. One copy a block would be a launch every 24 to 200 KiB:
at 25 GB/s such a copy takes 1 to 8 us, as long as its launch from Python, and each holds the
engine's thread. The gather is one launch for a whole staging area, in the device's own memory,
which is tens of times as fast as the bus: it adds a few per cent. On the host's side blocks that
were stored together lie in adjacent slots, so what crosses the bus is a few long copies; the copy
engines do these, and the processors that compute the steps are left alone, which a kernel that
reads the host's memory itself would hold for as long as the bus takes.

A lane is a queue of work on the device (`cuda_lanes`), one for each direction: loads, for which
requests wait, never queue behind stores. In a lane the pieces of a copy follow each other, so one
staging area a lane is enough.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.transfers import DeviceLink
from quire.tiers.host.copies import Copy

STAGING_BYTES = 16 << 20
"""Of a lane, or one block if that is larger: about half a millisecond of the bus."""

CopyPairs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(source, target, pairs): target[pairs[i, 1]] = source[pairs[i, 0]], see
`kernels.triton.attention.copy_blocks`."""


class Lane(Protocol):
    """A queue of a device's work, beside that of the steps. Called from one thread."""

    def queue(self, *, is_after_steps: bool) -> AbstractContextManager[None]:
        """What is launched inside goes into this queue, in its order. is_after_steps: and begins
        when all steps that were launched until now have ended."""
        ...

    def begin(self) -> None:
        """Inside `queue`, before a copy's first launch: its time counts from here."""
        ...

    def end(self) -> Copy:
        """Inside `queue`, behind a copy's last launch."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was queued has run."""
        ...


class StagedCopies:
    """See `copies.BlockCopies`."""

    def __init__(
        self,
        pool: torch.Tensor,
        host: torch.Tensor,
        lanes: tuple[Lane, Lane],
        copy_pairs: CopyPairs,
        free_host: Callable[[], None],
    ) -> None:
        """pool: [num_blocks, bytes of a block] uint8 on the device. host: [num_slots, the same] on
        the host; copies return at once where it is page-locked. lanes: for stores, and for loads.
        free_host: called once, at the end, after which the host's memory is used no more."""
        self.slots: NDArray[np.uint8] = host.numpy()
        self.pinned_bytes = host.nbytes
        self._pool, self._host = pool, host
        self._store_lane, self._load_lane = lanes
        self._copy_pairs = copy_pairs
        self._free_host: Callable[[], None] | None = free_host
        self._link = DeviceLink(pool.device)
        shape = (max(1, STAGING_BYTES // pool.shape[1]), pool.shape[1])
        self._store_staging, self._load_staging = (
            torch.empty(shape, dtype=torch.uint8, device=pool.device) for _ in lanes
        )

    @torch.inference_mode()
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        lane, staging = self._store_lane, self._store_staging
        with lane.queue(is_after_steps=True):
            lane.begin()
            for piece in _pieces(slots, blocks, len(staging)):
                pairs = [(block, at) for at, (_, block) in enumerate(piece)]
                self._copy_pairs(self._pool, staging, self._uploaded(pairs))
                for begin, end in _runs(piece):
                    slot = piece[begin][0]
                    target = self._host[slot : slot + end - begin]
                    target.copy_(staging[begin:end], non_blocking=True)
            return lane.end()

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Copy:
        lane, staging = self._load_lane, self._load_staging
        with lane.queue(is_after_steps=False):
            lane.begin()
            for piece in _pieces(slots, blocks, len(staging)):
                for begin, end in _runs(piece):
                    slot = piece[begin][0]
                    source = self._host[slot : slot + end - begin]
                    staging[begin:end].copy_(source, non_blocking=True)
                pairs = [(at, block) for at, (_, block) in enumerate(piece)]
                self._copy_pairs(staging, self._pool, self._uploaded(pairs))
            return lane.end()

    def warm_up(self) -> None:
        """Copy a block there and back, so that no request waits for what the first copy compiles.
        Waits for it."""
        self.store([0], [0])
        self._store_lane.synchronize()
        self.load([0], [0])
        self._load_lane.synchronize()

    def close(self) -> None:
        self._store_lane.synchronize()
        self._load_lane.synchronize()
        free_host, self._free_host = self._free_host, None
        if free_host is not None:
            free_host()

    def _uploaded(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        return self._link.upload(np.array(pairs, np.int64))


def copy_pairs_in_turn(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """A `CopyPairs` on any device, without Triton."""
    for at, to in pairs.tolist():
        target[to].copy_(source[at])


def _pieces(
    slots: Sequence[int], blocks: Sequence[int], size: int
) -> Iterator[list[tuple[int, int]]]:
    """(slot, block), by slot, in pieces of at most so many."""
    pairs = sorted(zip(slots, blocks, strict=True))
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size]


def _runs(piece: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and end of each stretch of adjacent slots."""
    begin = 0
    for end in range(1, len(piece) + 1):
        if end == len(piece) or piece[end][0] != piece[end - 1][0] + 1:
            yield begin, end
            begin = end
