"""Stores and loads: all moves of blocks between the KV pool and the tiers behind it.

The KV cache manager owns a `BlockMoves` if there are tiers. Reads no clock.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.growth import STEPS_IN_FLIGHT, Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.tiers.contract import MoveEnd, Tiers
from quire.core.memory.tiers.load_rule import pairs_of
from quire.core.memory.tiers.loads import Loads, Taker
from quire.core.memory.tiers.write_behind import WriteBehind
from quire.core.sequence import Sequence


class BlockMoves:
    """Stores and loads in flight.

    Invariant: a block has one reference for each entry of `blocks` that names it.
    """

    def __init__(
        self, tiers: Tiers, pool: BlockPool, cache: PrefixCache, growth: Growth, take: Taker
    ) -> None:
        """take: takes blocks from the pool, and evicts cached contents if necessary."""
        numbers = count()
        self.tiers = tiers
        self.stores = WriteBehind(tiers, pool, cache, growth, numbers.__next__)
        self.loads = Loads(tiers, pool, cache, growth, take, numbers.__next__)
        self._now_s = 0.0
        # Step id -> (tokens, pairs of attending tokens), for steps in flight that compute prompts.
        self._steps: dict[int, tuple[int, int]] = {}

    @property
    def num_in_flight(self) -> int:
        """Number of moves whose blocks may still be read or written."""
        return len(self.stores.in_flight) + self.loads.num_in_flight

    @property
    def num_free_soon(self) -> int:
        """Number of blocks that become free when moves in flight end.

        Leaves out moves that may hang: a sequence should not wait for them while other sequences
        could free blocks.
        """
        return self.stores.num_ending(self._now_s) + self.loads.num_ending

    def advance(self, now_s: float, *, is_last: bool = False, orders_stores: bool = True) -> None:
        """Process the moves that have ended, and, if orders_stores, order new stores.

        is_last: whether the engine has stopped computing. Then contents are stored without a delay.
        """
        self._now_s = now_s
        stored: list[MoveEnd] = []
        for end in self.tiers.ended():
            if end.order_id in self.stores.in_flight:
                stored.append(end)
            else:
                self.loads.finish_order(end, now_s)
        # Release the latest store first, so that a prefix's tail is evicted before its head.
        for end in sorted(stored, reverse=True):
            self.stores.end(end.order_id, is_done=end.is_done)
        self.loads.end_late(now_s)
        orders = self.stores.orders(now_s, at_once=is_last) if orders_stores else []
        if orders:
            self.tiers.start(orders, ())

    def launch(self, step_id: int, chunks: Mapping[Sequence, int]) -> None:
        """Record that a step with these chunks was launched. The sequences' counts already include
        the chunks, but not the drafts that the step verifies after them."""
        self._steps.pop(step_id - STEPS_IN_FLIGHT, None)  # it has ended, observed or not
        # A step of decodes is bound by reading weights, so it says nothing about prompts.
        if sum(chunks.values()) == len(chunks):
            return
        num_tokens = num_pairs = 0
        for sequence, num_new in chunks.items():
            num_drafts = len(sequence.draft_token_ids)
            first = sequence.num_computed_tokens - num_new
            num_tokens += num_new + num_drafts
            num_pairs += pairs_of(first, num_new + num_drafts)
        self._steps[step_id] = num_tokens, num_pairs

    def observe(self, step_id: int, seconds: float) -> None:
        """Record that a step took `seconds`."""
        step = self._steps.pop(step_id, None)
        if step is not None:
            self.loads.compute_time.observe(*step, seconds)

    def counts(self) -> dict[str, Any]:
        """Counts since the start, by name (see `LoadStats`, `WriteBehind`), as JSON can hold them.

        `by_tier` has the counters of each tier.
        """
        stores = self.stores
        return {
            **asdict(self.loads.stats),
            "num_stored_blocks": stores.num_stored,
            "num_not_stored_blocks": stores.num_not_stored,
            "num_too_late_blocks": stores.num_too_late,
            "num_waiting_blocks": stores.num_waiting,
            "by_tier": {name: dict(counts) for name, counts in self.tiers.counts().items()},
        }

    def clear(self) -> None:
        """Drop waiting stores and loads in flight, and clear the tiers."""
        self.stores.clear()
        self.loads.clear()
        self.tiers.clear()

    def blocks(self) -> list[int]:
        """The held blocks, with one entry for each reference; for checks and reports."""
        return [*self.stores.in_flight.values(), *self.loads.blocks()]
