"""Loads a prefix from tiers into the pool while its sequence waits.

A load publishes blocks in the prefix cache, like a computation. So a load that comes late, in part,
or twice does no harm, and admission finds loaded blocks like any cached blocks. Until admission,
the load holds all blocks of the prefix, including those that were in the pool before.

    sequence fits, tiers have more of its prompt   begin: takes blocks and sends orders
    an order has ended                             finish_order: publishes the block or frees it
    all have ended, or it takes too long           the sequence is admitted with the blocks so far
    admitted, ended, or outranked                  release: the load holds no blocks any more
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.growth import Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixMatch, public_root
from quire.core.memory.tiers.contract import SOON_S, LoadOrder, MoveEnd, Tiers
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.core.memory.tiers.tier_match import TierFinder, TierMatch, TierPrefix, WantedContent
from quire.core.sequence import Sequence

# A load is given up after this many times its predicted duration, but not before MIN_PATIENCE_S,
# and not while it is so fast that computing the rest would take longer.
PATIENCE = 2.0
MIN_PATIENCE_S = 0.05

# A late load goes on only if its rest takes at most this fraction of the predicted time to compute
# the same tokens. That prediction is rough: at 20 MB/s, a load that went on took 1.4 times as long
# as computing.
WORTH = 2 / 3

Taker = Callable[[int, Sequence], list[int]]
"""(count, sequence that needs the blocks) -> ids of blocks taken from the pool, each with one
reference."""


@dataclass(slots=True, eq=False)
class _Filling:
    """A block that a content is loaded into."""

    wanted: WantedContent
    block: int
    order_id: int
    has_landed: bool = False
    #: Whether the cache was cleared since, so that the content is dropped when it arrives.
    is_forgotten: bool = False
    #: Engine time at which the last waiting sequence left.
    left_s: float = 0.0
    #: Waiting sequences whose prefixes include the content.
    waiters: set[Sequence] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one sequence."""

    fillings: list[_Filling]
    #: Blocks of the prefix that were in the pool before the load; the load holds them.
    there: tuple[int, ...]
    #: Index of the first loaded token; earlier tokens were cached in the pool.
    first_token: int
    #: Number of tokens in the prefix once all fillings have come.
    num_tokens: int
    began_s: float
    predicted_s: float
    #: Engine time after which the load counts as late.
    deadline_s: float
    #: Number of fillings that have not ended.
    num_pending: int
    num_failed: int = 0


@dataclass(slots=True)
class LoadStats:
    """Counts of loads since the start."""

    #: Number of loads that were begun.
    num_loads: int = 0
    #: Number of loads that were not begun, because computing was predicted to be faster.
    num_declined: int = 0
    #: Number of loads that were given up because they took too long.
    num_late: int = 0
    num_failed_blocks: int = 0
    num_loaded_blocks: int = 0
    #: Number of loaded tokens that admitted sequences started from.
    num_loaded_tokens: int = 0
    #: Number of loaded prompt tokens of first admissions, which the prefix cache counts as hits.
    num_hit_tokens: int = 0
    #: Predicted seconds of complete loads, summed; `waited_s` has their measured seconds.
    predicted_s: float = 0.0
    waited_s: float = 0.0


class Loads:
    """All loads in flight, and completed loads of sequences that are not admitted yet.

    Invariant: a filling whose order has not ended, or that has waiters, has one reference to its
    block. A load has one reference to each block in its `there`.
    """

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        cache: PrefixCache,
        growth: Growth,
        take: Taker,
        new_order: Callable[[], int],
    ) -> None:
        self.stats = LoadStats()
        self.compute_time = ComputeTime()
        #: Called with the blocks that ordered loads fill; None if no one listens.
        self.on_order: Callable[[list[int]], None] | None = None
        self._tiers = tiers
        self._pool = pool
        self._cache = cache
        self._growth = growth
        self._take = take
        self._new_order = new_order
        self._finder = TierFinder(cache, tiers, growth)
        self._loads: dict[Sequence, _Load] = {}
        self._by_order: dict[int, _Filling] = {}
        self._by_content: dict[tuple[int, bytes], _Filling] = {}
        # Waiting sequence -> number of tokens that pool and tiers had when its load was considered.
        self._num_known: dict[Sequence, int] = {}
        self._now_s = 0.0

    # ---- sequences --------------------------------------------------------------------------

    def awaits(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for a load."""
        load = self._loads.get(sequence)
        return load is not None and load.num_pending > 0

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Number of the sequence's prompt tokens that pool and tiers had when a load was
        considered."""
        return self._num_known.get(sequence, 0)

    def begin(self, sequence: Sequence, match: PrefixMatch, now_s: float) -> bool:
        """Load more of the sequence's prefix than `match` has, if that is faster than computing it.

        Returns whether the sequence has to wait. A load is considered only once before each
        admission.
        """
        # First, find the contents that are not in the pool; give up if they need too many blocks.
        if sequence in self._num_known or not self._may_load(sequence):
            return False
        found = self._find(sequence)
        self._num_known[sequence] = found.num_tokens
        if found.num_tokens <= match.num_tokens or not found.missing:
            return False
        new = [content for content in found.missing if not self._is_coming(content)]
        num_revived = sum([not self._pool.ref_count[block] for block in found.there])
        if len(new) + num_revived > self._pool.num_free:
            return False
        # Then compare the times, and order the load.
        predicted_s = self._tiers.load_s([content[:2] for content in new])
        compute_s = self.compute_time.predict_s(match.num_tokens, found.num_tokens)
        if predicted_s == float("inf") or (compute_s is not None and compute_s <= predicted_s):
            self.stats.num_declined += 1
            return False
        self._order(sequence, match, found, new, now_s, predicted_s)
        return True

    def release(self, sequence: Sequence, num_admitted_tokens: int = 0) -> None:
        """End the sequence's wait, and release the blocks held for it.

        num_admitted_tokens: computed tokens that it starts with; 0 if it is not admitted.
        """
        self._num_known.pop(sequence, None)
        load = self._loads.pop(sequence, None)
        if load is None:
            return
        if num_admitted_tokens and any([filling.has_landed for filling in load.fillings]):
            reached = min(load.num_tokens, num_admitted_tokens)
            self.stats.num_loaded_tokens += max(0, reached - load.first_token)
            if sequence.num_admissions == 0:
                hit = min(reached, sequence.num_prompt_tokens)
                self.stats.num_hit_tokens += max(0, hit - load.first_token)
        # Release the prefix's tail first, so that it is evicted before the prefix's head.
        self._stop_waiting(sequence, load)
        self._pool.release_all(reversed(load.there))

    def abandon(self, sequence: Sequence) -> None:
        """Release the load of a sequence because its blocks are needed; it does not load again."""
        num_known = self._num_known.get(sequence)
        self.release(sequence)
        if num_known is not None:
            self._num_known[sequence] = num_known

    @property
    def sequences(self) -> list[Sequence]:
        """Waiting sequences whose load is in flight or complete."""
        return list(self._loads)

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Number of blocks that only the loads of these sequences hold."""
        those = {sequence for sequence in sequences if sequence in self._loads}
        loads = [self._loads[sequence] for sequence in those]
        fillings = {each for load in loads for each in load.fillings if each.waiters <= those}
        held = Counter([each.block for each in fillings])
        held.update([block for load in loads for block in load.there])
        counts = self._pool.ref_count
        return sum([counts[block] == count for block, count in held.items()])

    # ---- moves ------------------------------------------------------------------------------

    def finish_order(self, end: MoveEnd, now_s: float) -> None:
        """Handle the end of an order: publish its content, or give its block back."""
        filling = self._by_order.pop(end.order_id)
        if self._by_content.get(filling.wanted[:2]) is filling:  # else it was ordered again
            del self._by_content[filling.wanted[:2]]
        # First, publish the content or free the block.
        is_done = end.is_done and not filling.is_forgotten
        filling.has_landed = is_done
        self.stats.num_loaded_blocks += is_done
        self.stats.num_failed_blocks += not is_done
        if is_done:
            self._publish(filling)
        if not filling.waiters or not is_done:
            self._pool.release(filling.block)
        # Then update the loads of the waiting sequences.
        for sequence in filling.waiters:
            load = self._loads[sequence]
            load.num_failed += not is_done
            load.num_pending -= 1
            if not load.num_pending and not load.num_failed:
                self.stats.predicted_s += load.predicted_s
                self.stats.waited_s += now_s - load.began_s
        if not is_done:
            for sequence in filling.waiters:
                self._loads[sequence].fillings.remove(filling)
            filling.waiters.clear()

    def clear(self) -> None:
        """After the cache was cleared, stop waiting and drop contents that arrive from now on."""
        for sequence in list(self._loads):
            self.abandon(sequence)
        for filling in self._by_order.values():
            filling.is_forgotten = True

    def end_late(self, now_s: float) -> None:
        """Stop waiting for loads that take too long; blocks that have come stay."""
        self._now_s = now_s
        for sequence, load in self._loads.items():
            if not load.num_pending or now_s <= load.deadline_s:
                continue
            left_s = _left_s(load, now_s)
            compute_s = self.compute_time.predict_s(_first_missing(load), load.num_tokens)
            if compute_s is not None and left_s < WORTH * compute_s:
                # The prediction was wrong, but loading is still faster than computing the rest.
                more_s = min(left_s / 2, now_s - load.began_s)
                load.deadline_s = now_s + max(MIN_PATIENCE_S, more_s)
                continue
            self.stats.num_late += 1
            self._stop_waiting(sequence, load, only_pending=True)

    @property
    def num_ending(self) -> int:
        """Number of blocks that become free when their order ends, because no sequence waits for
        it; leaves out orders that may hang."""
        since_s = self._now_s - SOON_S
        return sum(
            [not each.waiters and each.left_s >= since_s for each in self._by_order.values()]
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._by_order)

    def blocks(self) -> list[int]:
        """The held blocks, with one entry for each reference; for checks and reports."""
        fillings = {
            each.order_id: each for load in self._loads.values() for each in load.fillings
        } | self._by_order
        held = [filling.block for filling in fillings.values()]
        return held + [block for load in self._loads.values() for block in load.there]

    # ---- parts ------------------------------------------------------------------------------

    def _may_load(self, sequence: Sequence) -> bool:
        """Whether the sequence may start from cached blocks; see `PrefixIndex.match`."""
        held = sequence.num_computed_tokens
        if sequence.parent is not None or sequence.needs_whole_prompt or sequence.is_in_one_step:
            return False
        return not held % self._growth.block_size and not (held and self._growth.bounded)

    def _is_coming(self, content: WantedContent) -> bool:
        """Whether another sequence waits for this content.

        A cancelled order may never be carried out, so its content is ordered again.
        """
        filling = self._by_content.get(content[:2])
        return filling is not None and bool(filling.waiters)

    def _find(self, sequence: Sequence) -> TierMatch:
        cache, size = self._cache, self._growth.block_size
        chains, roots = [sequence.chain], [sequence.chain_root]
        first: list[bytes] = []
        public = public_root(cache, sequence)
        spans = sequence.content_spans
        cache.extend_chain(first, public, sequence.token_ids[:size], spans)
        main = self._growth.main
        is_kept = first and main is not None and self._tiers.find(main, first[0])
        if is_kept or cache.has_public(public):
            cache.extend_chain(sequence.public_chain, public, sequence.token_ids, spans)
            chains.append(sequence.public_chain)
            roots.append(public)
        return self._finder.longest(
            TierPrefix(
                sequence.token_ids,
                sequence.chain_tokens,
                chains,
                roots,
                sequence.num_computed_tokens // size,
                spans,
            )
        )

    def _order(
        self,
        sequence: Sequence,
        match: PrefixMatch,
        found: TierMatch,
        new: list[WantedContent],
        now_s: float,
        predicted_s: float,
    ) -> None:
        for block in found.there:
            self._pool.share(block, is_use=False)
        orders: list[LoadOrder] = []
        for content, block in zip(new, self._take(len(new), sequence), strict=True):
            filling = _Filling(content, block, self._new_order())
            self._by_order[filling.order_id] = self._by_content[content[:2]] = filling
            orders.append(LoadOrder(filling.order_id, block, content.group, content.name))
        fillings = [self._by_content[content[:2]] for content in found.missing]
        for filling in fillings:
            filling.waiters.add(sequence)
        self._loads[sequence] = _Load(
            fillings,
            found.there,
            match.num_tokens,
            found.num_tokens,
            now_s,
            predicted_s,
            now_s + max(MIN_PATIENCE_S, PATIENCE * predicted_s),
            len(fillings),
        )
        self.stats.num_loads += 1
        if orders:
            if self.on_order is not None:
                self.on_order([order.block for order in orders])
            self._tiers.start((), orders)

    def _publish(self, filling: _Filling) -> None:
        """Publish the block's content.

        If the content was cached in the meantime, the load holds that older block instead.
        """
        group, name, parent, tokens, is_first = filling.wanted
        inserted = self._cache.insert_run(
            group, [name], [filling.block], [tokens], parent, is_first
        )
        if inserted:
            self._pool.set_contents(group, inserted)
            return
        known = self._cache.find(group, name)
        assert known is not None, "a content is cached, but its block is missing"
        self._pool.share(known, is_use=False)
        self._pool.release(filling.block)
        filling.block = known

    def _stop_waiting(self, sequence: Sequence, load: _Load, *, only_pending: bool = False) -> None:
        """Stop waiting for all fillings, or (only_pending) for those that have not ended."""
        cancelled: list[int] = []
        released: list[int] = []
        kept: list[_Filling] = []
        for filling in load.fillings:
            if only_pending and filling.has_landed:
                kept.append(filling)
                continue
            filling.waiters.discard(sequence)
            if not filling.waiters:
                if filling.has_landed:
                    released.append(filling.block)
                else:
                    filling.left_s = self._now_s
                    cancelled.append(filling.order_id)
        self._pool.release_all(reversed(released))
        load.fillings, load.num_pending = kept, 0
        if cancelled:
            self._tiers.cancel(cancelled)


def _left_s(load: _Load, now_s: float) -> float:
    """Seconds until the load is complete, at the pace so far; infinite if nothing has come."""
    num_landed = len(load.fillings) - load.num_pending
    if not num_landed:
        return float("inf")
    return (now_s - load.began_s) * load.num_pending / num_landed


def _first_missing(load: _Load) -> int:
    """The first token that would have to be computed, if blocks come in their order."""
    num_tokens = load.num_tokens - load.first_token
    return load.num_tokens - num_tokens * load.num_pending // len(load.fillings)
