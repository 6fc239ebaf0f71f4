"""Interface of copies between the pool and the host tier's slots."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Copy(Protocol):
    """One batch of blocks that is being copied."""

    def is_over(self) -> bool:
        """Whether the copy has ended, so that it no longer accesses the pool or the slots."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds that the copy took, without waiting; valid once it is over."""
        ...


class BlockCopies(Protocol):
    """Copies of whole blocks. All calls come from the engine's thread, and only `close` waits.

    Copies in one direction run in order; the two directions are independent. A `store` reads what
    the steps launched before it have written. A `load` may begin at once, so no step in flight may
    access its blocks. Steps launched after it is over see the loaded bytes.
    """

    #: The slots in host memory, [num_slots, bytes of a block] uint8.
    slots: NDArray[np.uint8]
    #: Bytes of page-locked memory.
    pinned_bytes: int

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Begin to copy each block of the pool into a slot."""
        ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Copy:
        """Begin to copy each slot into a block of the pool."""
        ...

    def close(self) -> None:
        """Wait for all copies to end. No copy may begin afterwards."""
        ...
