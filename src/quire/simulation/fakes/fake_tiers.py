"""A tier behind the fake runner's KV cache, on the virtual clock.

Moves end when their time has come, in any order; some fail, some take far too long, and what is
kept may be lost at any moment. A block that is filled holds rubbish until then, and one that is
stored must hold at the end what it held at the beginning. What is kept outlives a crash.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.errors import ConfigurationError
from quire.simulation.fakes.fake_store import BlockBytes, FakeStore

# Of the moves that are cancelled, so many are not carried out.
CANCELLED_RATE = 0.7
# Of these, so many end at once.
AT_ONCE_RATE = 0.5
# A slow move takes so many times as long, and one that hangs ends after so long.
SLOW_FACTOR = 50.0
HANG_S = 100.0
# So long no stores are taken, once they are not.
PAUSE_S = 0.5


@dataclass(slots=True)
class KeptContents:
    """What a tier keeps: bytes by group and name, and the partly filled ones by what precedes them.

    Outlives the engine, as files do.
    """

    contents: dict[tuple[int, bytes], BlockBytes] = field(default_factory=dict)
    tails: dict[bytes, dict[bytes, Tail]] = field(default_factory=dict)

    def keep(self, order: StoreOrder, found: BlockBytes) -> None:
        """What an order to store has brought."""
        self.contents[order.group, order.name] = found
        if order.tokens:
            tails = self.tails.setdefault(order.parent, {})
            tails[order.name] = Tail(order.tokens, order.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTier:
    """latency_s, block_s: a move takes latency + block seconds behind those before it.
    failure_rate: moves that come to nothing. slow_rate: those that take 50 times as long.
    hang_rate: those that take 100 seconds. pause_rate: moves after which no stores are taken for
    half a second. clear_rate: moves at whose end all that was kept is lost. misjudged: predictions
    are wrong by up to this factor, either way.
    loss_rate: moves at whose end one content that was kept is lost. stored_share: contents that are
    stored at all, as if there was no room for the others. settle_s: what may soon be of no use is
    stored so much later."""

    latency_s: float = 0.0
    block_s: float = 0.0
    failure_rate: float = 0.0
    slow_rate: float = 0.0
    loss_rate: float = 0.0
    stored_share: float = 1.0
    settle_s: float = 0.0
    hang_rate: float = 0.0
    pause_rate: float = 0.0
    clear_rate: float = 0.0
    misjudged: float = 1.0


@dataclass(slots=True)
class TierFaults:
    """How often what a simulated tier may do wrong has happened."""

    num_failed: int = 0
    num_slow: int = 0
    num_hung: int = 0
    num_pauses: int = 0
    num_lost: int = 0
    num_clears: int = 0
    num_cancelled: int = 0
    num_done_though_cancelled: int = 0
    num_vanished: int = 0  # between an order to load and its end


def simulated_tier(options: Sequence[tuple[str, float]]) -> SimulatedTier:
    """Of its fields by name. Raises ConfigurationError for others."""
    known = [each.name for each in fields(SimulatedTier)]
    for name, _ in options:
        if name not in known:
            raise ConfigurationError(f"a simulated tier has no {name}; it has {', '.join(known)}")
    return SimulatedTier(**dict(options))


class FakeTiers:
    """See `core.memory.tiers.contract.Tiers`."""

    def __init__(
        self,
        kept: KeptContents,
        store: FakeStore,
        tier: SimulatedTier,
        rng: random.Random,
        now: Callable[[], float],
        wait_until: Callable[[float], None],
    ) -> None:
        """now, wait_until: of the virtual clock."""
        self.num_loaded = 0
        self.faults = TierFaults()
        self._kept = kept
        self._store = store
        self._tier = tier
        self._rng = rng
        self._now = now
        self._wait_until = wait_until
        self._pause_ends_s = 0.0
        self._free_s = 0.0  # when all that was asked for is done, were nothing slow
        self._under_way: dict[int, tuple[StoreOrder | LoadOrder, BlockBytes]] = {}
        self._due: list[tuple[float, int]] = []  # a heap of (when, order)
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
                continue  # it has ended when it was cancelled
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
        """Nothing is under way that would have to be waited for."""

    def _end(self, order: StoreOrder | LoadOrder, before: BlockBytes, *, is_done: bool) -> bool:
        kept, rng = self._kept, self._rng
        if isinstance(order, StoreOrder):
            now = self._store.read_block(order.block)
            same = (now.slots == before.slots).all()
            is_same = same and now.num_state_tokens == before.num_state_tokens
            assert is_same, f"block {order.block} was changed while it was stored"
            if is_done and rng.random() < self._tier.stored_share:
                kept.keep(order, before)
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
