"""Loads of waiting sequences: a prefix is brought into the pool while its sequence waits.

A load is to the pool what computing is: blocks get content, and the cache knows them. So what comes
late, in part, or twice harms nothing, and admission finds it as it finds all else. Until then the
load holds what the prefix takes, what was there before included.

    sequence fits, tiers have more of its prompt   begin: blocks are taken, orders go out
    an order has ended                             land: the block is published, or given back
    all have ended, or it takes too long           the sequence is admitted with what is there
    admitted, ended, or outranked                  release: nothing is held any more
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

# A load that takes so many times what was predicted is given up, but not before a while, and not
# while it comes so fast that the rest would take longer to compute.
PATIENCE = 2.0
MIN_PATIENCE_S = 0.05

# The rest has to come in so much of the time that it would take to compute, which is known roughly:
# at 20 MB/s, a load that was waited for took 1.4 times what computing took.
WORTH = 2 / 3

Taker = Callable[[int, Sequence], list[int]]
"""(count, for whom) -> blocks out of the pool, held."""


@dataclass(slots=True, eq=False)
class _Filling:
    """A block that a content is loaded into. waiters: whose prefixes it is part of. left_s: when
    the last of them left. is_forgotten: the cache was cleared since, so what comes is not kept."""

    wanted: WantedContent
    block: int
    order_id: int
    has_landed: bool = False
    is_forgotten: bool = False
    left_s: float = 0.0
    waiters: set[Sequence] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Load:
    """Of one sequence. there: blocks that its prefix takes beside `fillings`, held for it."""

    fillings: list[_Filling]
    there: tuple[int, ...]
    first_token: int
    num_tokens: int
    began_s: float
    predicted_s: float
    deadline_s: float
    num_pending: int
    num_failed: int = 0


@dataclass(slots=True)
class LoadStats:
    """Counts since the start.

    num_loads: begun. num_declined: computing was predicted to be faster. num_late: given up, since
    they took too long. num_loaded_tokens: with which sequences went on that came so;
    num_hit_tokens: of them, those of prompts that were admitted for the first time, which the
    prefix cache counts as hits. predicted_s, waited_s: of loads of which all came, summed.
    """

    num_loads: int = 0
    num_declined: int = 0
    num_late: int = 0
    num_failed_blocks: int = 0
    num_loaded_blocks: int = 0
    num_loaded_tokens: int = 0
    num_hit_tokens: int = 0
    predicted_s: float = 0.0
    waited_s: float = 0.0


class Loads:
    """All loads under way, and those that have come for sequences which are not admitted yet.

    Invariant: of each filling whose order has not ended, or that has waiters, its block has one
    reference for it; of each block in `there` of a load, one for that load.
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
        self._num_known: dict[Sequence, int] = {}  # tokens that tiers had when it was decided
        self._now_s = 0.0

    # ---- sequences --------------------------------------------------------------------------

    def awaits(self, sequence: Sequence) -> bool:
        """Whether it waits for what is being loaded."""
        load = self._loads.get(sequence)
        return load is not None and load.num_pending > 0

    def num_known_tokens(self, sequence: Sequence) -> int:
        """The tokens that pool and tiers had of its prompt when it was asked for."""
        return self._num_known.get(sequence, 0)

    def begin(self, sequence: Sequence, match: PrefixMatch, now_s: float) -> bool:
        """Load more of its prefix than `match` has, if that is faster than to compute it; returns
        whether it has to wait. Decided once until it is admitted."""
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
        predicted_s = self._tiers.load_s([content[:2] for content in new])
        compute_s = self.compute_time.predict_s(match.num_tokens, found.num_tokens)
        if predicted_s == float("inf") or (compute_s is not None and compute_s <= predicted_s):
            self.stats.num_declined += 1
            return False
        self._order(sequence, match, found, new, now_s, predicted_s)
        return True

    def release(self, sequence: Sequence, num_admitted_tokens: int = 0) -> None:
        """It waits no more, and nothing is held for it. num_admitted_tokens: with which it goes on,
        if it does."""
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
        # The prefix's tail goes first, so that it is evicted before what comes before it.
        self._leave(sequence, load)
        self._pool.release_all(reversed(load.there))

    def give_up(self, sequence: Sequence) -> None:
        """Its blocks are needed: nothing is held for it, and it does not ask again."""
        num_known = self._num_known.get(sequence)
        self.release(sequence)
        if num_known is not None:
            self._num_known[sequence] = num_known

    @property
    def sequences(self) -> list[Sequence]:
        """For which something was loaded, or is being loaded."""
        return list(self._loads)

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that only the loads of these sequences hold."""
        those = {sequence for sequence in sequences if sequence in self._loads}
        loads = [self._loads[sequence] for sequence in those]
        fillings = {each for load in loads for each in load.fillings if each.waiters <= those}
        held = Counter([each.block for each in fillings])
        held.update([block for load in loads for block in load.there])
        counts = self._pool.ref_count
        return sum([counts[block] == count for block, count in held.items()])

    # ---- moves ------------------------------------------------------------------------------

    def land(self, end: MoveEnd, now_s: float) -> None:
        """An order has ended: its content is findable, or its block is given back."""
        filling = self._by_order.pop(end.order_id)
        if self._by_content.get(filling.wanted[:2]) is filling:  # else it was ordered anew
            del self._by_content[filling.wanted[:2]]
        is_done = end.is_done and not filling.is_forgotten
        filling.has_landed = is_done
        self.stats.num_loaded_blocks += is_done
        self.stats.num_failed_blocks += not is_done
        if is_done:
            self._publish(filling)
        if not filling.waiters or not is_done:
            self._pool.release(filling.block)
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
        """The cache was cleared: nothing is waited for, and what is under way is not kept."""
        for sequence in list(self._loads):
            self.give_up(sequence)
        for filling in self._by_order.values():
            filling.is_forgotten = True

    def end_late(self, now_s: float) -> None:
        """Give up waiting for what takes too long; what came of it is kept."""
        self._now_s = now_s
        for sequence, load in self._loads.items():
            if not load.num_pending or now_s <= load.deadline_s:
                continue
            left_s = _left_s(load, now_s)
            compute_s = self.compute_time.predict_s(_first_missing(load), load.num_tokens)
            if compute_s is not None and left_s < WORTH * compute_s:
                # The tier was misjudged, but is still faster than computing what lacks.
                more_s = min(left_s / 2, now_s - load.began_s)
                load.deadline_s = now_s + max(MIN_PATIENCE_S, more_s)
                continue
            self.stats.num_late += 1
            self._leave(sequence, load, only_pending=True)

    @property
    def num_ending(self) -> int:
        """Blocks that nothing waits for any more: free when their order has ended, which is soon,
        unless it hangs."""
        since_s = self._now_s - SOON_S
        return sum(
            [not each.waiters and each.left_s >= since_s for each in self._by_order.values()]
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._by_order)

    def blocks(self) -> list[int]:
        """One entry for each reference; for checks and the ledger."""
        fillings = {
            each.order_id: each for load in self._loads.values() for each in load.fillings
        } | self._by_order
        held = [filling.block for filling in fillings.values()]
        return held + [block for load in self._loads.values() for block in load.there]

    # ---- parts ------------------------------------------------------------------------------

    def _may_load(self, sequence: Sequence) -> bool:
        """Whether it may go on from what is cached; see `PrefixIndex.match`."""
        held = sequence.num_computed_tokens
        if sequence.parent is not None or sequence.needs_whole_prompt or sequence.is_in_one_step:
            return False
        return not held % self._growth.block_size and not (held and self._growth.bounded)

    def _is_coming(self, content: WantedContent) -> bool:
        """Whether another waits for it. One that was cancelled may not come: it is ordered anew."""
        filling = self._by_content.get(content[:2])
        return filling is not None and bool(filling.waiters)

    def _find(self, sequence: Sequence) -> TierMatch:
        cache, size = self._cache, self._growth.block_size
        chains, roots = [sequence.chain], [sequence.chain_root]
        first: list[bytes] = []
        public = public_root(cache, sequence)
        cache.extend_chain(first, public, sequence.token_ids[:size])
        main = self._growth.main
        is_kept = first and main is not None and self._tiers.find(main, first[0])
        if is_kept or cache.has_public(public):
            cache.extend_chain(sequence.public_chain, public, sequence.token_ids)
            chains.append(sequence.public_chain)
            roots.append(public)
        return self._finder.longest(
            TierPrefix(
                sequence.token_ids,
                sequence.chain_tokens,
                chains,
                roots,
                sequence.num_computed_tokens // size,
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
            self._tiers.start((), orders)

    def _publish(self, filling: _Filling) -> None:
        """A content that is known by now keeps its older block, which is held instead."""
        group, name, parent, tokens, is_first = filling.wanted
        inserted = self._cache.insert_run(
            group, [name], [filling.block], [tokens], parent, is_first
        )
        if inserted:
            self._pool.set_contents(group, inserted)
            return
        known = self._cache.find(group, name)
        assert known is not None, "a content was known, but is not there"
        self._pool.share(known, is_use=False)
        self._pool.release(filling.block)
        filling.block = known

    def _leave(self, sequence: Sequence, load: _Load, *, only_pending: bool = False) -> None:
        """It waits for none of its fillings any more, or for none that has not come."""
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
    """How long what lacks of a load will take, at the pace so far; infinite if nothing has come."""
    num_landed = len(load.fillings) - load.num_pending
    if not num_landed:
        return float("inf")
    return (now_s - load.began_s) * load.num_pending / num_landed


def _first_missing(load: _Load) -> int:
    """The token from which on would have to be computed, if blocks come in their order."""
    num_tokens = load.num_tokens - load.first_token
    return load.num_tokens - num_tokens * load.num_pending // len(load.fillings)
