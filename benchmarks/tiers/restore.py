"""How fast the disk tier restores blocks, beside a plain read of its files and a copy in memory.

    python -m benchmarks.tiers.restore --folder FOLDER [--mib 512] [--pages 196608,24576] \\
        [--rounds 5] [--records 100000]

FOLDER lies on the disk that is measured; what is written there is removed at the end. For each
size of a page and each round, a tier stores blocks of random bytes and is closed, and is opened
again for each restore, as after a restart of the process. Then take turns, all into the same
memory:

- warm: a restore of all blocks by one order each, all given at once, out of the page cache as
  writing has left it; every checksum is verified, and in the first round every byte is compared;
- warm: a plain preadv of the files, 1 MiB at a time and in their order;
- a copy of as many bytes with `numpy.copyto`, by one thread;
- cold: both again, each after POSIX_FADV_DONTNEED;
- read before: the restore once more, out of what reading has left in the page cache.

Rates are bytes of blocks (of files, for plain reads) by wall time, medians over the rounds; a ratio
is the median of the rounds' ratios. Then: how long it takes to find the index of many small
records, and how long orders to store occupy the engine's thread.
"""

import argparse
import gc
import os
import secrets
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.kernels.cpu.library import load_library
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.native_files import NativeFiles
from quire.tiers.disk.store import SegmentStore

FINGERPRINT = bytes(16)
PLAIN_BYTES = 1 << 20
ORDERS_A_STEP = 16
SMALL_BYTES = 64
GIB, GB = 1 << 30, 1e9

Pool = NDArray[np.uint8]


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def seconds_of(function: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def open_tier(folder: Path, pool: Pool) -> DiskTier:
    budget = DiskBudget(max(4 * pool.nbytes, GIB))
    return DiskTier(
        *(CacheFolder.open(folder, NativeFiles(load_library())), FINGERPRINT, budget),
        *(pool, [pool.shape[1]], lambda: None),
    )


def store_all(tier: DiskTier, num_blocks: int) -> list[float]:
    """Store all blocks, as steps would order them. Returns how long each call of `start` took."""
    took_s, num_done = [], 0
    for begin in range(0, num_blocks, ORDERS_A_STEP):
        while not tier.takes_stores:
            time.sleep(1e-3)
            num_done += sum(end.is_done for end in tier.ended())
        orders = [
            StoreOrder(number, number, 0, name_of(number))
            for number in range(begin, min(begin + ORDERS_A_STEP, num_blocks))
        ]
        took_s.append(seconds_of(lambda orders=orders: tier.start(orders, ())))  # type: ignore[misc]
    while num_done < num_blocks:
        time.sleep(1e-3)
        num_done += sum(end.is_done for end in tier.ended())
    return took_s


def restore(folder: Path, pool: Pool) -> float:
    """Load all blocks in a tier that was opened for it. Returns the seconds that the loads took."""
    tier = open_tier(folder, pool)
    orders = [LoadOrder(number, number, 0, name_of(number)) for number in range(len(pool))]
    gc.freeze()  # as an engine's process does
    begun_s = time.perf_counter()
    tier.start((), orders)
    num_ended = 0
    while num_ended < len(orders):
        ended = tier.ended()
        assert all(end.is_done for end in ended), "a block did not come"
        num_ended += len(ended)
        if num_ended < len(orders):
            tier.wait(0.01)  # as an engine that has nothing else to do
    took_s = time.perf_counter() - begun_s
    tier.close()
    return took_s


def read_plainly(files: Sequence[Path], pool: Pool) -> None:
    memory = pool.reshape(-1).data
    position = 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while came := os.preadv(descriptor, [memory[position : position + PLAIN_BYTES]], offset):
            offset += came
            position = (position + came) % (pool.nbytes - PLAIN_BYTES)
        os.close(descriptor)


def drop_from_cache(files: Sequence[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_pages(folder: Path, page_bytes: int, total_bytes: int, rounds: int) -> list[str]:
    """The lines of one size of a page."""
    num_blocks = total_bytes // page_bytes
    pool = np.random.default_rng(0).integers(0, 256, (num_blocks, page_bytes), dtype=np.uint8)
    wanted = pool.copy()
    took_us: list[float] = []
    rates: dict[str, list[float]] = defaultdict(list)

    def measure_restore(name: str) -> None:
        pool[:] = 0
        rates[f"{name} restore"].append(pool.nbytes / restore(folder, pool) / GB)

    def measure_plain(name: str) -> None:
        num_bytes = sum(path.stat().st_size for path in files)
        rates[f"{name} plain"].append(
            num_bytes / seconds_of(lambda: read_plainly(files, pool)) / GB
        )

    for number in range(rounds):
        pool[:] = wanted
        tier = open_tier(folder, pool)
        took_us += [1e6 * took_s for took_s in store_all(tier, num_blocks)]
        tier.close(timeout_s=300)
        files = sorted(folder.rglob("*.seg"))
        measure_restore("warm")
        assert number or np.array_equal(pool, wanted), "other bytes came"
        measure_plain("warm")
        rates["memcpy"].append(pool.nbytes / seconds_of(lambda: np.copyto(pool, wanted)) / GB)
        drop_from_cache(files)
        read_plainly(files, pool)  # from then on a virtual disk's host may have them in its cache
        drop_from_cache(files)
        measure_plain("cold")
        drop_from_cache(files)
        measure_restore("cold")
        measure_restore("read")
        shutil.rmtree(folder)
    took_us.sort()

    def ratio(left: str, right: str) -> float:
        pairs = zip(rates[left], rates[right], strict=True)
        return statistics.median(each / other for each, other in pairs)

    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        f"| {page_bytes // 1024} KiB"
        f" | {medians['cold restore']:.2f} | {medians['cold plain']:.2f}"
        f" | {ratio('cold restore', 'cold plain'):.2f}"
        f" | {medians['warm restore']:.2f} | {medians['warm plain']:.2f}"
        f" | {medians['memcpy']:.2f} | {ratio('warm restore', 'memcpy'):.2f}"
        f" | {ratio('read restore', 'memcpy'):.2f}"
        f" | {took_us[len(took_us) // 2]:.0f} / {took_us[int(0.99 * len(took_us))]:.0f} |"
    ]


def measure_index(folder: Path, num_records: int) -> float:
    """Seconds to open a store of num_records small records, whose last segment is not sealed."""
    opened = CacheFolder.open(folder)
    store = SegmentStore(opened, FINGERPRINT, 64 * GIB)
    payload = memoryview(secrets.token_bytes(SMALL_BYTES))
    for begin in range(0, num_records, 1000):
        orders = [StoreOrder(0, 0, 0, name_of(begin + number)) for number in range(1000)]
        store.append(orders, [payload] * len(orders))
        if begin == num_records // 2000 * 1000:
            store.seal()
    took_s = []
    for _ in range(3):
        begun_s = time.perf_counter()
        found = SegmentStore(opened, FINGERPRINT, 64 * GIB)
        took_s.append(time.perf_counter() - begun_s)
        assert len(found.index) == num_records
    store.seal()
    opened.close()
    return statistics.median(took_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=512, help="bytes of blocks (%(default)s MiB)")
    parser.add_argument("--pages", default="196608,24576", help="bytes of a page (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--records", type=int, default=100_000, help="of the index (%(default)s)")
    given = parser.parse_args(arguments)
    print(
        "GB/s; the last column: microseconds of the engine's thread for 16 stores, median / p99\n\n"
        "| page | cold restore | cold preadv | ratio | warm restore | warm preadv | memcpy"
        " | restore / memcpy | read before | 16 stores |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for page_bytes in map(int, given.pages.split(",")):
        folder = given.folder / f"restore-{page_bytes}-{secrets.token_hex(4)}"
        try:
            lines = measure_pages(folder, page_bytes, given.mib << 20, given.rounds)
            print("\n".join(lines), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    folder = given.folder / f"index-{secrets.token_hex(4)}"
    try:
        took_s = measure_index(folder, given.records)
        print(f"\nindex of {given.records} records, half of them unsealed: {took_s:.3f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
