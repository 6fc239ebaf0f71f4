"""Has the system give the pool's memory before the first loads fill it.

Memory that nothing was written to yet is given as it is written, and cleared first. In a virtual
machine whose host has to find it that takes longer than to read a disk: 0.65 GB/s beside 3 GB/s
(AMD EPYC, November 2026). After a restart nearly all loads go into such memory, so it is asked for
while nothing else is to be done.
"""

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable

from quire.observability.log import get_logger

PART_BYTES = 4 << 20
"""That are asked for by one call: it ends soon after whoever calls `stop`."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python does not name: gives pages that can be written, and leaves what
is in them. Linux has it since 5.14."""
SLEEP_S = 0.005

logger = get_logger(__name__)


class FirstTouch:
    """A thread that asks for a range of memory, from its begin on.

    Its bytes stay as they are, whoever writes them meanwhile. Where the system can't do that, the
    memory is given as it is written.
    """

    def __init__(self, address: int, num_bytes: int, may_go_on: Callable[[], bool]) -> None:
        """The memory stays there until `stop` has returned. may_go_on: asked before each part; as
        long as it says no, nothing is asked for."""
        self.num_bytes_touched = 0
        self._address = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_bytes = (address + num_bytes - self._address) // mmap.PAGESIZE * mmap.PAGESIZE
        self._may_go_on = may_go_on
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._touch_all, name="quire-cache-touch", daemon=True
        )
        if sys.platform.startswith("linux"):
            self._thread.start()

    def stop(self) -> None:
        """Ask for no more. Waits for a part."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._thread.join()

    def _touch_all(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        while self.num_bytes_touched < self._num_bytes and not self._is_stopped:
            if not self._may_go_on():
                time.sleep(SLEEP_S)
                continue
            begin = ctypes.c_void_p(self._address + self.num_bytes_touched)
            size = min(PART_BYTES, self._num_bytes - self.num_bytes_touched)
            if libc.madvise(begin, ctypes.c_size_t(size), POPULATE_WRITE) != 0:
                logger.debug("the pool's memory is not asked for: errno %d", ctypes.get_errno())
                return
            self.num_bytes_touched += size
