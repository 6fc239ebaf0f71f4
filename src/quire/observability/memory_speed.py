"""Measures the speed of reading memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

BYTES_EACH = 64 << 20
"""The bytes that each thread reads: more than its share of usual caches."""


def measure_reads(num_threads: int, available_bytes: int, seconds: float) -> float:
    """Bytes per second that `num_threads` threads together read from memory.

    First fills the memory that is read, at most a quarter of available_bytes, then measures for
    about `seconds`.
    """
    import numpy as np  # takes a tenth of a second, and only this function needs it

    num_bytes_each = min(BYTES_EACH, available_bytes // (4 * num_threads))
    arrays = [np.ones(max(1, num_bytes_each // 8), np.uint64) for _ in range(num_threads)]
    until_s = time.perf_counter() + seconds

    def read(array: "np.ndarray[Any, np.dtype[np.uint64]]") -> float:
        """Compute the array's maximum repeatedly; numpy does it without the GIL and with SIMD."""
        num_bytes, began_s = 0, time.perf_counter()
        while True:
            array.max()
            num_bytes += array.nbytes
            now_s = time.perf_counter()
            if now_s >= until_s:
                return num_bytes / (now_s - began_s)

    with ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(read, arrays))
