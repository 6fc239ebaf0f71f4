"""Copies blocks between the GPU's pool and host memory, through a staging area.

The staging area is in GPU memory. A slot is space for one block in host memory.

    store   pool blocks, anywhere  --gather-->   staging  --one copy a run-->  slots, in runs
    load    slots, in runs  --one copy a run-->  staging  --scatter-->   pool blocks, anywhere

The blocks of a prefix are scattered over the pool. Separate copies would need a launch for each
block of 24 to 200 KiB. At 25 GB/s, such a copy takes 1 to 8 us, no longer than its launch from
Python, which occupies the engine's thread.

The gather fills a whole staging area with one launch. Device memory is tens of times faster than
the bus, so the gather adds a few per cent. On the host, blocks that were stored together lie in
adjacent slots, so a few long copies cross the bus. The GPU's copy engines make these copies and
leave the multiprocessors to the steps. A kernel that accesses host memory directly would occupy
multiprocessors during the transfer.

A lane is a queue of work on the device (`cuda_lanes`). Each direction has its own lane, so that
loads, for which requests wait, never queue behind stores. The work in a lane runs in order, so one
staging area for each lane is enough.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.transfers import DeviceLink

STAGING_BYTES = 16 << 20
"""Size of a lane's staging area in bytes, but at least one block. A full area crosses the bus in
about half a millisecond."""

CopyPairs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(source, target, pairs): target[pairs[i, 1]] = source[pairs[i, 0]], see
`kernels.triton.attention.copy_blocks`."""


class Copy(Protocol):
    """One batch of blocks that is being copied."""

    def is_over(self) -> bool:
        """True once the copy has ended and no longer accesses the pool or the slots."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds that the copy ran, without time in the queue; valid after `is_over` returned
        True."""
        ...


class Lane(Protocol):
    """A queue of work on the device, which runs concurrently with steps. Called from one thread."""

    def queue(self, *, is_after_steps: bool) -> AbstractContextManager[None]:
        """Work launched in this context goes into the queue, in order. With `is_after_steps`, it
        begins after all steps launched so far have ended."""
        ...

    def begin(self) -> None:
        """Mark the beginning of a copy. Called inside `queue`, before the copy's first launch."""
        ...

    def end(self) -> Copy:
        """Mark the end of a copy. Called inside `queue`, after the copy's last launch."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...


class StagedCopies:
    """Copies whole blocks through one staging area per direction. All calls come from the engine's
    thread; only `warm_up` and `close` block.

    Copies in one direction run in order; the two directions are independent. A `store` reads the
    bytes written by all steps launched before it. A `load` may begin at once, so no step in flight
    may access its blocks. Steps launched after the load is over see the loaded bytes.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        host: torch.Tensor,
        lanes: tuple[Lane, Lane],
        copy_pairs: CopyPairs,
        free_host: Callable[[], None],
    ) -> None:
        """`pool` is [num_blocks, bytes of a block] uint8 on the device, `host` [num_slots, bytes of
        a block] on the host. Copies are asynchronous only if `host` is page-locked. `lanes` are the
        lane for stores and the lane for loads. `close` calls `free_host` once, when the host memory
        is no longer used."""
        #: The slots in host memory, [num_slots, bytes of a block] uint8.
        self.slots: NDArray[np.uint8] = host.numpy()
        #: Number of bytes of page-locked memory.
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
        """Begin to copy each block of the pool into a slot."""
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
        """Begin to copy each slot into a block of the pool."""
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
        """Copy a block to the host and back, and wait for both copies, so that no request waits for
        the kernel compilation of a first copy."""
        self.store([0], [0])
        self._store_lane.synchronize()
        self.load([0], [0])
        self._load_lane.synchronize()

    def close(self) -> None:
        """Wait for all copies to end. No copy may begin afterwards."""
        self._store_lane.synchronize()
        self._load_lane.synchronize()
        free_host, self._free_host = self._free_host, None
        if free_host is not None:
            free_host()

    def _uploaded(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        return self._link.upload(np.array(pairs, np.int64))


def copy_pairs_in_turn(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """A `CopyPairs` for any device, without Triton."""
    for at, to in pairs.tolist():
        target[to].copy_(source[at])


def _pieces(
    slots: Sequence[int], blocks: Sequence[int], size: int
) -> Iterator[list[tuple[int, int]]]:
    """(slot, block) pairs, sorted by slot, in pieces of at most `size`."""
    pairs = sorted(zip(slots, blocks, strict=True))
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size]


def _runs(piece: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) in `piece` of each run of adjacent slots."""
    begin = 0
    for end in range(1, len(piece) + 1):
        if end == len(piece) or piece[end][0] != piece[end - 1][0] + 1:
            yield begin, end
            begin = end
