"""All moves between the pool and the tiers behind it: orders out, ends in.

Owned by the KV cache manager where there are tiers; without, there is none of this. Reads no clock.
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
    """Stores and loads under way.

    Invariant: a block has one reference for each entry of `blocks` that names it.
    """

    def __init__(
        self, tiers: Tiers, pool: BlockPool, cache: PrefixCache, growth: Growth, take: Taker
    ) -> None:
        """take: gets blocks out of the pool, at the expense of what is cached."""
        numbers = count()
        self.tiers = tiers
        self.stores = WriteBehind(tiers, pool, cache, growth, numbers.__next__)
        self.loads = Loads(tiers, pool, cache, growth, take, numbers.__next__)
        self._now_s = 0.0
        # In flight, of those that compute prompts: tokens and pairs.
        self._steps: dict[int, tuple[int, int]] = {}

    @property
    def num_in_flight(self) -> int:
        """Moves whose blocks are still touched."""
        return len(self.stores.in_flight) + self.loads.num_in_flight

    @property
    def num_free_soon(self) -> int:
        """Blocks that are free as soon as moves under way have ended. Not of those that hang: a
        sequence that waited for these would stand still, although others could make room."""
        return self.stores.num_ending(self._now_s) + self.loads.num_ending

    def go_on(self, now_s: float, *, is_last: bool = False, orders_stores: bool = True) -> None:
        """Take in what has ended, and, if it orders_stores, order what is to be stored.

        is_last: nothing is computed any more, so what would wait for a while need not.
        """
        self._now_s = now_s
        stored: list[MoveEnd] = []
        for end in self.tiers.ended():
            if end.order_id in self.stores.in_flight:
                stored.append(end)
            else:
                self.loads.land(end, now_s)
        # The last ordered first, so that a prefix's tail is evicted before what comes before it.
        for end in sorted(stored, reverse=True):
            self.stores.end(end.order_id, is_done=end.is_done)
        self.loads.end_late(now_s)
        orders = self.stores.orders(now_s, at_once=is_last) if orders_stores else []
        if orders:
            self.tiers.start(orders, ())

    def launch(self, step_id: int, chunks: Mapping[Sequence, int]) -> None:
        """A step is sent that computes so many tokens of each; their counts have them already."""
        self._steps.pop(step_id - STEPS_IN_FLIGHT, None)  # it has ended, whether observed or not
        num_tokens = sum(chunks.values())
        # Where all rows decode, they mostly wait for the weights: that says nothing about prompts.
        if num_tokens == len(chunks):
            return
        num_pairs = sum(
            [
                pairs_of(sequence.num_computed_tokens - num_new, num_new)
                for sequence, num_new in chunks.items()
            ]
        )
        self._steps[step_id] = num_tokens, num_pairs

    def observe(self, step_id: int, seconds: float) -> None:
        """A step has ended and took so long."""
        step = self._steps.pop(step_id, None)
        if step is not None:
            self.loads.compute_time.observe(*step, seconds)

    def counts(self) -> dict[str, Any]:
        """What was loaded and stored since the start, by name (see `LoadStats`, `WriteBehind`), and
        `by_tier`: what each tier counts. As JSON can hold it."""
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
        """Nothing is stored that was published before, nor comes what was being loaded, and the
        tiers forget what they have."""
        self.stores.clear()
        self.loads.clear()
        self.tiers.clear()

    def blocks(self) -> list[int]:
        """One entry for each reference; for checks and the ledger."""
        return [*self.stores.in_flight.values(), *self.loads.blocks()]
