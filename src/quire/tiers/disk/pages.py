"""The block pool's memory as byte ranges: which bytes of a block each KV group uses."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.tiers.disk.files import Targets
from quire.tiers.disk.record import MAX_GROUPS


class Pages:
    """The block pool's memory, divided into pages, one per block."""

    def __init__(self, storage: NDArray[np.uint8], bytes_of_group: Sequence[int]) -> None:
        """`storage` is [num_blocks, bytes of a block], contiguous and writable.

        Raises ValueError.
        """
        is_plain = storage.dtype == np.uint8 and storage.ndim == 2 and storage.flags.c_contiguous
        if not (is_plain and storage.flags.writeable):
            raise ValueError(
                "storage must be a writable, contiguous uint8 array [num_blocks, bytes of a block],"
                f" not {storage.dtype} {storage.shape}"
            )
        if not 0 < len(bytes_of_group) <= MAX_GROUPS or not all(
            0 < size <= storage.shape[1] for size in bytes_of_group
        ):
            raise ValueError(
                f"bytes_of_group is {list(bytes_of_group)}, but must list 1 to {MAX_GROUPS}"
                f" groups with 1 to {storage.shape[1]} bytes each"
            )
        #: Group g uses the first `bytes_of_group[g]` bytes of a page.
        self.bytes_of_group = tuple(bytes_of_group)
        #: Total bytes of all pages.
        self.num_bytes = storage.nbytes
        self._stride = storage.shape[1]
        self._memory = storage.reshape(-1).data
        #: Memory address of the first page.
        self.address = int(storage.ctypes.data)

    def views(self, orders: Sequence[StoreOrder]) -> list[memoryview]:
        """The used bytes of each order's block."""
        memory, stride, sizes = self._memory, self._stride, self.bytes_of_group
        return [memory[order[1] * stride : order[1] * stride + sizes[order[2]]] for order in orders]

    def targets(self, orders: Sequence[LoadOrder]) -> Targets:
        """The used bytes of each order's block, as targets of a read."""
        count = len(orders)
        begins = np.fromiter([order[1] for order in orders], np.int64, count) * self._stride
        if len(self.bytes_of_group) == 1:
            sizes = np.full(count, self.bytes_of_group[0], np.int64)
        else:
            sizes = np.array(self.bytes_of_group, np.int64)[[order[2] for order in orders]]
        return Targets(self._memory, self.address, begins, sizes)

    def num_bytes_of(self, orders: Sequence[LoadOrder] | Sequence[StoreOrder]) -> int:
        sizes = self.bytes_of_group
        if len(sizes) == 1:
            return len(orders) * sizes[0]
        return sum([sizes[order[2]] for order in orders])
