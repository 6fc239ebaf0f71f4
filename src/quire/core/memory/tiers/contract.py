"""The interface between the KV memory and the tiers behind it: plain data, and one protocol.

A tier keeps copies of cached contents, under their names in the prefix cache. The memory asks which
contents a tier has, and orders moves: blocks to store, blocks to fill. A tier carries out moves
beside the steps and reports later, in any order, how each ended. Only the method `wait` blocks.

    the memory                                a tier
    find(group, name), tails(parent)   <->    an index in memory
    start(stores, loads), cancel        ->    queues of moves
    ended()                             <-    ids of moves that have ended, and their success

The block of a store has content and is not written to until the store has ended. The block of a
load is in no table and has no content until the load has ended. The memory holds a reference to
each block until its move has ended, even if the move was cancelled. A load that failed, for any
reason, is a miss: the content of its block is undefined.

Implemented by `quire.tiers` on files and on a GPU's host memory, and by `simulation`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

# A move that takes longer than this many seconds counts as hanging: sequences then use other blocks
# instead of waiting for the move's block.
SOON_S = 1.0


class StoreOrder(NamedTuple):
    """Order to keep a copy of a block's bytes."""

    order_id: int
    block: int
    #: The content's KV group.
    group: int
    #: The content's name in the prefix cache, of at most 18 bytes.
    name: bytes
    #: Digest before a partly filled block; empty for other contents.
    parent: bytes = b""
    #: Tokens of a partly filled block, packed by `packed_tokens`; empty for other contents.
    tokens: bytes = b""


class LoadOrder(NamedTuple):
    """Order to fill a block with the bytes of a content."""

    order_id: int
    block: int
    group: int
    name: bytes


class MoveEnd(NamedTuple):
    """A move that has ended: its block is no longer touched."""

    order_id: int
    #: Whether the bytes were moved.
    is_done: bool


class Tail(NamedTuple):
    """A stored, partly filled block: its tokens, packed by `packed_tokens`, and its name."""

    tokens: bytes
    name: bytes


class Tiers(Protocol):
    """All tiers behind the pool, as the memory uses them. Called from the engine's thread only."""

    def find(self, group: int, name: bytes) -> bool:
        """Whether a copy of this content is stored, as far as is known."""
        ...

    def tails(self, parent: bytes) -> Sequence[Tail]:
        """The stored, partly filled blocks that follow the digest `parent`, in the first group with
        slots."""
        ...

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        """Accept orders; the end of each is reported by `ended`. Loads are carried out before
        stores."""
        ...

    def cancel(self, order_ids: Iterable[int]) -> None:
        """Drop these orders; moves that have not begun end soon, with is_done False."""
        ...

    def ended(self) -> list[MoveEnd]:
        """The moves that have ended since the last call."""
        ...

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        """Predicted seconds of a load of these contents, if it were ordered now, including the
        queue.

        Infinite while a content can't be read. contents: group and name of each.
        """
        ...

    @property
    def takes_stores(self) -> bool:
        """Whether stores would be carried out now; if not, ordering them would hold blocks for
        nothing."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until `ended` has moves to report, but at most timeout_s.

        A successful load may be ignored until all loads of its `start` call have ended. For an
        engine that has nothing else to do.
        """
        ...

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """The counters of each tier by name, as JSON types. Only for display."""
        ...

    def clear(self) -> None:
        """Forget all contents, in every tier; moves in flight end, done or not."""
        ...

    def close(self) -> None:
        """Finish the ordered stores within a bounded time. Afterwards no block is touched."""
        ...
