"""What stays in the pool is kept in the tiers as well, also after they have forgotten it."""

from collections.abc import Iterable, Mapping, Sequence

from tests.core.harness import make_groups, make_sequence
from tests.core.memory.test_kv_cache_manager import STEP, admit, write

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.core.scheduling import invariants

PROMPT = list(range(13))


class NamesOnly:
    """Tiers that keep names and no bytes: for what is ordered to be stored."""

    def __init__(self) -> None:
        self.kept: set[tuple[int, bytes]] = set()
        self.takes_stores = True
        self.num_ordered = 0
        self._under_way: list[StoreOrder] = []

    def find(self, group: int, name: bytes) -> bool:
        return (group, name) in self.kept

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return ()

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        assert not loads, "computing is predicted to be faster"
        self.num_ordered += len(stores)
        self._under_way += stores

    def cancel(self, order_ids: Iterable[int]) -> None:
        raise AssertionError("only loads are cancelled")

    def ended(self) -> list[MoveEnd]:
        ends = [MoveEnd(order.order_id, True) for order in self._under_way]
        self.kept |= {(order.group, order.name) for order in self._under_way}
        self._under_way.clear()
        return ends

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        return float("inf")

    def wait(self, timeout_s: float) -> None:
        """Nothing takes time."""

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        """Nothing is held."""


def make(num_blocks: int = 16) -> tuple[KVCacheManager, NamesOnly]:
    tiers = NamesOnly()
    config = KVCacheConfig(make_groups(1), num_blocks, 4, True, b"secret", tiers=tiers)
    return KVCacheManager(config), tiers


def go_on(memory: KVCacheManager) -> None:
    """Until nothing is to be stored any more."""
    for now_s in range(1, 40):
        memory.set_time(memory.now_s + now_s)
    assert memory.moves is not None
    assert not memory.moves.num_in_flight
    assert not memory.moves.stores.num_waiting
    invariants.check_memory(memory, [])


def test_a_block_that_the_tier_dropped_is_stored_again_when_used() -> None:
    memory, tiers = make()
    memory.free(write(memory, PROMPT))
    go_on(memory)
    kept = set(tiers.kept)
    assert len(kept) == 4, "three full blocks and a partly filled one"
    tiers.kept.clear()
    go_on(memory)
    assert not tiers.kept, "nobody has used it"
    sequence = make_sequence(memory, [*PROMPT, 99])
    admit(memory, sequence)
    memory.end_step(STEP)
    memory.free(sequence)
    go_on(memory)
    assert tiers.kept >= kept


def test_a_block_that_the_tier_has_is_not_stored_again() -> None:
    memory, tiers = make()
    memory.free(write(memory, PROMPT))
    go_on(memory)
    num_ordered = tiers.num_ordered
    for _ in range(3):
        sequence = make_sequence(memory, PROMPT)
        admit(memory, sequence)
        memory.end_step(STEP)
        memory.free(sequence)
    go_on(memory)
    assert tiers.num_ordered == num_ordered


def test_a_block_is_stored_once_though_it_is_used_meanwhile() -> None:
    memory, tiers = make()
    memory.free(write(memory, PROMPT))
    for _ in range(3):  # its stores wait, then are under way
        sequence = make_sequence(memory, PROMPT)
        admit(memory, sequence)
        memory.set_time(memory.now_s + 0.001)
        memory.end_step(STEP)
        memory.free(sequence)
    go_on(memory)
    assert tiers.num_ordered == len(tiers.kept) == 4


def test_waiting_stores_are_bounded_while_the_tier_takes_none() -> None:
    memory, tiers = make()
    tiers.takes_stores = False
    for number in range(40):
        memory.free(write(memory, [number, *PROMPT]))
        memory.set_time(memory.now_s + 0.5)
    assert memory.moves is not None
    assert memory.moves.stores.num_waiting <= memory.pool.num_blocks
    assert memory.moves.stores.num_too_late > 0
    tiers.takes_stores = True
    go_on(memory)
    contents = {key for key in memory.pool.content if key is not None}
    assert tiers.kept == contents, "what is still there is stored when it can be"
