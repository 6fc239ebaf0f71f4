"""A fake tier behind the fake runner's KV cache, on the virtual clock.

A move is the load or store of one block. Moves take random times and end in any order. Some fail,
some take far too long, and stored contents may be lost at any time. A block that is being loaded
contains garbage until its move ends. A block that is being stored must not change. Stored contents
survive a crash.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.errors import ConfigurationError
from quire.simulation.fakes.fake_store import BlockBytes, FakeStore

#: The share of cancelled moves that are really cancelled; the others are carried out.
CANCELLED_RATE = 0.7
#: The share of really cancelled moves that end at once; the others end at their usual time.
AT_ONCE_RATE = 0.5
#: The factor by which a slow move takes longer.
SLOW_FACTOR = 50.0
#: The seconds by which a hanging move takes longer.
HANG_S = 100.0
#: The seconds for which a pausing tier accepts no stores.
PAUSE_S = 0.5


@dataclass(slots=True)
class KeptContents:
    """The stored contents of a tier. Like files, they remain when the engine ends."""

    #: The contents of full blocks by KV group and name.
    contents: dict[tuple[int, bytes], BlockBytes] = field(default_factory=dict)
    #: Partly filled blocks, by the digest of the prefix that precedes them and then by name.
    tails: dict[bytes, dict[bytes, Tail]] = field(default_factory=dict)

    def store(self, order: StoreOrder, found: BlockBytes) -> None:
        """Store `found`, the content of the order's block."""
        self.contents[order.group, order.name] = found
        if order.tokens:
            tails = self.tails.setdefault(order.parent, {})
            tails[order.name] = Tail(order.tokens, order.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTier:
    """Latencies and faults of a simulated tier. A move is the load or store of a block."""

    #: The mean latency of a move in seconds.
    latency_s: float = 0.0
    #: The seconds for which each move occupies a queue that carries out one move at a time.
    block_s: float = 0.0
    #: The share of moves that fail.
    failure_rate: float = 0.0
    #: The share of moves that take 50 times their usual time.
    slow_rate: float = 0.0
    #: The share of moves at whose end one stored content is lost.
    loss_rate: float = 0.0
    #: The share of contents that are stored. Others are refused, as if the tier were full.
    stored_share: float = 1.0
    #: The seconds by which the KV memory delays stores of contents that may soon be useless.
    settle_s: float = 0.0
    #: The share of moves that take 100 seconds longer.
    hang_rate: float = 0.0
    #: The share of moves after which the tier refuses stores for half a second.
    pause_rate: float = 0.0
    #: The share of moves at whose end all stored contents are lost.
    clear_rate: float = 0.0
    #: The maximum ratio between a predicted and a true load time, in either direction.
    misjudged: float = 1.0


@dataclass(slots=True)
class TierFaults:
    """Counts of the faults of a simulated tier."""

    num_failed: int = 0
    num_slow: int = 0
    num_hung: int = 0
    num_pauses: int = 0
    num_lost: int = 0
    num_clears: int = 0
    num_cancelled: int = 0
    num_done_though_cancelled: int = 0
    #: Number of contents that were lost while they were being loaded.
    num_vanished: int = 0


def simulated_tier(options: Sequence[tuple[str, float]]) -> SimulatedTier:
    """The tier whose fields have these names and values. Raises ConfigurationError for unknown
    names."""
    known = [each.name for each in fields(SimulatedTier)]
    for name, _ in options:
        if name not in known:
            raise ConfigurationError(f"a simulated tier has no {name}; it has {', '.join(known)}")
    return SimulatedTier(**dict(options))


class FakeTiers:
    """A `core.memory.tiers.contract.Tiers` with the times and faults of a SimulatedTier."""

    def __init__(
        self,
        kept: KeptContents,
        store: FakeStore,
        tier: SimulatedTier,
        rng: random.Random,
        now: Callable[[], float],
        wait_until: Callable[[float], None],
    ) -> None:
        """`now` returns the virtual clock's seconds, and `wait_until` sets the clock."""
        self.num_loaded = 0
        self.faults = TierFaults()
        self._kept = kept
        self._store = store
        self._tier = tier
        self._rng = rng
        self._now = now
        self._wait_until = wait_until
        self._pause_ends_s = 0.0
        self._free_s = 0.0  # the time at which the queue is empty, without latencies and faults
        self._under_way: dict[int, tuple[StoreOrder | LoadOrder, BlockBytes]] = {}
        self._due: list[tuple[float, int]] = []  # a heap of (time, order id)
        self._cancelled: set[int] = set()

    def find(self, group: int, name: bytes) -> bool:
        return (group, name) in self._kept.contents

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return list(self._kept.tails.get(parent, {}).values())

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        rng = self._rng
        orders: list[StoreOrder | LoadOrder] = [*loads, *stores]
        for order in orders:
            assert order.order_id not in self._under_way, f"{order} was given twice"
            if isinstance(order, LoadOrder):
                self._store.scribble([order.block])
            self._free_s = max(self._free_s, self._now()) + self._tier.block_s
            takes_s = self._free_s - self._now() + self._tier.latency_s * rng.random() * 2
            if rng.random() < self._tier.slow_rate:
                takes_s *= SLOW_FACTOR
                self.faults.num_slow += 1
            if rng.random() < self._tier.hang_rate:
                takes_s += HANG_S
                self.faults.num_hung += 1
            self._under_way[order.order_id] = order, self._store.read_block(order.block)
            heapq.heappush(self._due, (self._now() + takes_s, order.order_id))

    def cancel(self, order_ids: Iterable[int]) -> None:
        for order_id in order_ids:
            assert order_id in self._under_way, f"order {order_id} was cancelled, but is not there"
            self.faults.num_cancelled += 1
            if self._rng.random() < CANCELLED_RATE:
                self._cancelled.add(order_id)
                if self._rng.random() < AT_ONCE_RATE:
                    heapq.heappush(self._due, (self._now(), order_id))
            else:
                self.faults.num_done_though_cancelled += 1

    def ended(self) -> list[MoveEnd]:
        ends = []
        while self._due and self._due[0][0] <= self._now():
            order_id = heapq.heappop(self._due)[1]
            if order_id not in self._under_way:
                continue  # it ended when it was cancelled
            order, before = self._under_way.pop(order_id)
            is_done = order.order_id not in self._cancelled
            if is_done and self._rng.random() < self._tier.failure_rate:
                self.faults.num_failed += 1
                is_done = False
            self._cancelled.discard(order.order_id)
            ends.append(MoveEnd(order.order_id, self._end(order, before, is_done=is_done)))
        self._rng.shuffle(ends)
        return ends

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        ahead_s = max(0.0, self._free_s - self._now())
        true_s = ahead_s + self._tier.latency_s + self._tier.block_s * len(contents)
        return true_s * math.pow(self._tier.misjudged, self._rng.uniform(-1.0, 1.0))

    @property
    def takes_stores(self) -> bool:
        return self._now() >= self._pause_ends_s

    def wait(self, timeout_s: float) -> None:
        first_s = self._due[0][0] if self._due else self._now() + timeout_s
        self._wait_until(max(self._now(), min(first_s, self._now() + timeout_s)))

    def counts(self) -> dict[str, dict[str, float]]:
        counts: dict[str, float] = {"num_records": len(self._kept.contents)}
        counts |= {"loads_done": self.num_loaded} | asdict(self.faults)
        return {"fake": counts}

    def clear(self) -> None:
        self._kept.contents.clear()
        self._kept.tails.clear()

    def close(self) -> None:
        """See `Tiers`. Has no effect, since the fake has no threads."""

    def _end(self, order: StoreOrder | LoadOrder, before: BlockBytes, *, is_done: bool) -> bool:
        kept, rng = self._kept, self._rng
        if isinstance(order, StoreOrder):
            now = self._store.read_block(order.block)
            same = (now.slots == before.slots).all()
            is_same = same and now.num_state_tokens == before.num_state_tokens
            assert is_same, f"block {order.block} was changed while it was stored"
            if is_done and rng.random() < self._tier.stored_share:
                kept.store(order, before)
        else:
            found = kept.contents.get((order.group, order.name))
            self.faults.num_vanished += is_done and found is None
            is_done = is_done and found is not None
            if is_done and found is not None:
                self._store.write_block(order.block, found)
            self.num_loaded += is_done
        if kept.contents and rng.random() < self._tier.loss_rate:
            del kept.contents[rng.choice(sorted(kept.contents))]
            self.faults.num_lost += 1
        if rng.random() < self._tier.clear_rate:
            self.clear()
            self.faults.num_clears += 1
        if rng.random() < self._tier.pause_rate:
            self._pause_ends_s = self._now() + PAUSE_S
            self.faults.num_pauses += 1
        return is_done
