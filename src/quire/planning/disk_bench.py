"""Measures the speeds of the disk tier in a cache folder, with the tier's own code.

Blocks are stored and loaded in a new folder inside the cache folder, which is removed afterwards.
The loads read what was just written, so that mostly the system's page cache answers, as it does for
a cache folder that fits into free memory.
"""

import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.errors import ConfigurationError
from quire.kernels.cpu.library import load_library
from quire.simulation.virtual_disk import DiskSpeeds
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.load_rate import LoadSpeed
from quire.tiers.disk.native_files import NativeFiles
from quire.tiers.disk.record import record_bytes

#: Bytes of all blocks that are stored and loaded.
TOTAL_BYTES = 32 << 20
#: The fewest and the most blocks that are stored and loaded.
LEAST_BLOCKS, MOST_BLOCKS = 16, 2048
NUM_ROUNDS = 7
#: The bytes over which a simulated step computes a checksum: about a millisecond of work that holds
#: no lock of Python.
STEP_BYTES = 2 << 20
WAIT_S = 0.01
LIMIT_S = 60.0


def measure_disk(
    folder: Path, block_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> DiskSpeeds:
    """Measure the speeds of blocks of `block_bytes` bytes in the cache folder `folder`.

    Raises ConfigurationError if the folder can't be used, or a move fails or takes too long.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="measure-", dir=folder) as place:
            return _measure_in(Path(place), block_bytes, clock)
    except OSError as error:
        raise ConfigurationError(
            f"cache_dir {str(folder)!r} can't be measured: {error.strerror or error}"
        ) from error


def _measure_in(place: Path, block_bytes: int, clock: Callable[[], float]) -> DiskSpeeds:
    num_blocks = min(max(TOTAL_BYTES // block_bytes, LEAST_BLOCKS), MOST_BLOCKS)
    storage = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    budget = DiskBudget(64 * num_blocks * record_bytes(block_bytes) + (64 << 20))
    cache = CacheFolder.open(place, NativeFiles(load_library()))
    tier = DiskTier(cache, bytes(16), budget, storage, [block_bytes], lambda: None)
    bench = _DiskBench(tier, record_bytes(block_bytes), clock)
    try:
        stored_s = bench.store(num_blocks)
        store_s_per_byte = stored_s / num_blocks / record_bytes(block_bytes)
        alone, beside = (bench.load_speed(num_blocks, steps=steps) for steps in (False, True))
        return DiskSpeeds(alone, beside, store_s_per_byte)
    finally:
        tier.close()


class _DiskBench:
    """Times moves of a disk tier. Block i keeps the content that is named i."""

    def __init__(self, tier: DiskTier, record: int, clock: Callable[[], float]) -> None:
        self._tier, self._record_bytes, self._clock = tier, record, clock
        self._numbers = count()
        self._step = bytes(STEP_BYTES)

    def store(self, num_blocks: int) -> float:
        """The seconds to store the blocks while steps run."""
        orders = [
            StoreOrder(next(self._numbers), block, 0, _name(block)) for block in range(num_blocks)
        ]
        began_s = self._clock()
        self._tier.start(orders, ())
        self._wait_for(len(orders), steps=True)
        return self._clock() - began_s

    def load_speed(self, num_blocks: int, *, steps: bool) -> LoadSpeed:
        """The speed of loads, beside steps or alone: from the medians of loads of one block and of
        all blocks."""
        self._load(range(num_blocks), steps=steps)  # warm up
        ones_s, all_s = [], []
        for number in range(NUM_ROUNDS):
            ones_s.append(self._load([number % num_blocks], steps=steps))
            all_s.append(self._load(range(num_blocks), steps=steps))
        one_s = median(ones_s)
        more_s = max(median(all_s) - one_s, 1e-9)
        s_per_byte = more_s / (num_blocks - 1) / self._record_bytes
        return LoadSpeed(max(one_s - s_per_byte * self._record_bytes, 0.0), s_per_byte)

    def _load(self, blocks: Sequence[int], *, steps: bool) -> float:
        orders = [LoadOrder(next(self._numbers), block, 0, _name(block)) for block in blocks]
        began_s = self._clock()
        self._tier.start((), orders)
        self._wait_for(len(orders), steps=steps)
        return self._clock() - began_s

    def _wait_for(self, num_moves: int, *, steps: bool) -> None:
        """Wait for moves as an engine does that runs steps, or none."""
        until_s = self._clock() + LIMIT_S
        while num_moves:
            if steps:
                zlib.crc32(self._step)
            else:
                self._tier.wait(WAIT_S)
            ends = self._tier.ended()
            num_moves -= len(ends)
            if not all(end.is_done for end in ends):
                raise OSError("a move failed")
            if num_moves and self._clock() > until_s:
                raise OSError(f"moves took more than {LIMIT_S:g} s")


def _name(block: int) -> bytes:
    return block.to_bytes(16, "little")
