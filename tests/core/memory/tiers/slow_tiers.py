"""Tiers whose moves end when a test says so: names and order ids, and bytes of a fake runner."""

from collections.abc import Iterable, Mapping, Sequence

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.simulation.fakes.fake_store import BlockBytes, FakeStore


class SlowTiers:
    """kept: what is found. stores, loads: orders under way. cancelled: of them. seconds: what a
    load is predicted to take. store: of a fake runner, whose bytes are moved; None: none are."""

    def __init__(self) -> None:
        self.store: FakeStore | None = None
        self.kept: set[tuple[int, bytes]] = set()
        self.kept_tails: dict[bytes, list[Tail]] = {}
        self.stores: dict[int, StoreOrder] = {}
        self.loads: dict[int, LoadOrder] = {}
        self.cancelled: list[int] = []
        self.takes_stores = True
        self.seconds = 0.001
        self._ended: list[MoveEnd] = []
        self._bytes: dict[tuple[int, bytes], BlockBytes] = {}

    def find(self, group: int, name: bytes) -> bool:
        return (group, name) in self.kept

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self.kept_tails.get(parent, [])

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        self.stores |= {order.order_id: order for order in stores}
        self.loads |= {order.order_id: order for order in loads}

    def cancel(self, order_ids: Iterable[int]) -> None:
        for order_id in order_ids:
            assert order_id in self.loads or order_id in self.stores
            self.cancelled.append(order_id)

    def end(self, order_ids: Iterable[int], *, is_done: bool = True) -> None:
        """These end; what was stored is found, tails too."""
        for order_id in list(order_ids):
            store = self.stores.pop(order_id, None)
            if store is None:
                load = self.loads.pop(order_id)
                if self.store is not None and is_done:
                    self.store.write_block(load.block, self._bytes[load.group, load.name])
            elif is_done:
                self.kept.add((store.group, store.name))
                if self.store is not None:
                    self._bytes[store.group, store.name] = self.store.read_block(store.block)
                if store.tokens:
                    tails = self.kept_tails.setdefault(store.parent, [])
                    tails.append(Tail(store.tokens, store.name))
            self._ended.append(MoveEnd(order_id, is_done))

    def ended(self) -> list[MoveEnd]:
        ended, self._ended = self._ended, []
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        return self.seconds

    def wait(self, timeout_s: float) -> None:
        """Nothing takes time."""

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    def clear(self) -> None:
        self.kept.clear()
        self.kept_tails.clear()

    def close(self) -> None:
        """Nothing is held."""
