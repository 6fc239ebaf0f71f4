"""The seam to what copies between the pool and the host tier's slots."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Copy(Protocol):
    """One batch of blocks that is copied."""

    def is_over(self) -> bool:
        """Whether all its bytes have come, so that neither side is touched any more."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took, without what it waited for; once it is over."""
        ...


class BlockCopies(Protocol):
    """Copies of whole blocks. All calls come from the engine's thread, and none but `close` waits.

    slots: the host's side, [num_slots, bytes of a block] uint8. pinned_bytes: of it, page-locked.

    Copies in one direction come in their order; those of both at any time. What orders them against
    the steps: `store` reads what steps wrote that were launched before it. `load` may begin at
    once, so no step in flight may touch its blocks; steps that are launched once it is over see
    what it brought.
    """

    slots: NDArray[np.uint8]
    pinned_bytes: int

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Begin to copy each block of the pool into a slot."""
        ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Copy:
        """Begin to copy each slot into a block of the pool."""
        ...

    def close(self) -> None:
        """Wait until no copy is under way. Nothing may be copied afterwards."""
        ...
