"""The contract between the memory and the tiers behind it: plain data, and one protocol.

A tier keeps copies of cached contents, by the names under which the prefix cache has them. The
memory asks what is there, and orders moves: blocks to be stored, blocks to be filled. A tier does
that beside the steps and reports later, in any order, how each ended. Nothing but `wait` waits.

    the memory                                a tier
    find(group, name), tails(parent)   <->    an index in memory
    start(stores, loads), cancel        ->    queues of moves
    ended()                             <-    ids of moves that have ended, and whether they came

What holds meanwhile: a block that is stored has content and is not written to, and one that is
filled is in no table and has no content. Both are referenced until their move has ended, also where
it was cancelled. A load that has failed, for whatever reason, is a miss: its block holds anything.

Implemented by `quire.tiers` on files and on a GPU's host memory, and by `simulation`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

# A move that has not ended after so long may hang: nothing waits for its block while it can have
# another one.
SOON_S = 1.0


class StoreOrder(NamedTuple):
    """Keep a copy of a block's bytes.

    group, name: of its content, as the prefix cache has it; a name has at most 18 bytes. parent: of
    a partly filled block the digest of what comes before it, else empty. tokens: of a partly filled
    block its tokens, 4 bytes each as `hash_chain.sortable` makes them, else empty.
    """

    order_id: int
    block: int
    group: int
    name: bytes
    parent: bytes = b""
    tokens: bytes = b""


class LoadOrder(NamedTuple):
    """Fill a block with the bytes of a content."""

    order_id: int
    block: int
    group: int
    name: bytes


class MoveEnd(NamedTuple):
    """A move has ended: its block is touched no more. is_done: whether its bytes have come."""

    order_id: int
    is_done: bool


class Tail(NamedTuple):
    """A partly filled block that is kept: its tokens, 4 bytes each, and its name."""

    tokens: bytes
    name: bytes


class Tiers(Protocol):
    """All tiers behind the pool, as the memory sees them. Called from the engine's thread only."""

    def find(self, group: int, name: bytes) -> bool:
        """Whether a copy of this content is kept, as far as is known."""
        ...

    def tails(self, parent: bytes) -> Sequence[Tail]:
        """The partly filled blocks that are kept of those that follow `parent`, a digest; those of
        the first group with tokens."""
        ...

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        """Take in orders; each ends at some time, by `ended`. Loads go before stores."""
        ...

    def cancel(self, order_ids: Iterable[int]) -> None:
        """These need not be carried out any more; what has not begun ends soon, undone."""
        ...

    def ended(self) -> list[MoveEnd]:
        """The moves that have ended since the last call."""
        ...

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        """How long a load of these would take, asked for now: what is ahead of it included.
        Infinite while one of them can't be read. contents: group and name of each."""
        ...

    @property
    def takes_stores(self) -> bool:
        """Whether orders to store would be carried out now; else they are not worth a reference."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until something has ended that `ended` has not told of and that is worth going on for: a
        store, all loads of one call, a load that failed; or for so long. For an engine that has
        nothing else to do."""
        ...

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """What each tier counts, by its name and the counter's, as JSON can hold it; for people."""
        ...

    def clear(self) -> None:
        """Forget all contents, in every tier; moves under way end, done or not."""
        ...

    def close(self) -> None:
        """Keep what was ordered, within a bounded time, and touch no block any more."""
        ...
