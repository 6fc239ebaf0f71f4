"""How long a load is waited for that takes longer than was predicted."""

from collections.abc import Sequence

import pytest
from tests.core.harness import make_groups, make_sequence
from tests.core.memory.test_kv_cache_manager import write
from tests.core.memory.tiers.test_store_again import NamesOnly, go_on

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder

PROMPT = list(range(41))  # ten full blocks and a token
PREDICTED_S = 0.1


class Loading(NamesOnly):
    """Loads end when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[LoadOrder] = []
        self.num_to_end = 0

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        super().start(stores, ())
        self.loads += loads

    def ended(self) -> list[MoveEnd]:
        come, self.loads = self.loads[: self.num_to_end], self.loads[self.num_to_end :]
        self.num_to_end = 0
        return super().ended() + [MoveEnd(order.order_id, True) for order in come]

    def cancel(self, order_ids: object) -> None:
        """They go on."""

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        return PREDICTED_S


@pytest.mark.parametrize(
    ("compute_s", "blocks_a_turn", "is_late"),
    [
        (100.0, 1, False),  # slow, but computing would take longer
        (0.01, 1, True),
        (100.0, 0, True),  # it hangs from the second block on
        (None, 1, True),  # nothing is known of computing
    ],
)
def test_loads_faster_than_computing_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, compute_s: float | None, blocks_a_turn: int, is_late: bool
) -> None:
    tiers = Loading()
    memory = KVCacheManager(KVCacheConfig(make_groups(1), 64, 4, True, b"secret", tiers=tiers))
    memory.free(write(memory, PROMPT))
    go_on(memory)
    memory.prefixes.clear()
    moves = memory.moves
    assert moves is not None
    loads = moves.loads
    sequence = make_sequence(memory, PROMPT)
    assert loads.begin(sequence, memory.prefixes.match(sequence), memory.now_s)
    monkeypatch.setattr(loads.compute_time, "predict_s", lambda *_: compute_s)
    num_blocks = len(tiers.loads)
    for turn in range(num_blocks):  # each takes as long as was predicted of all
        tiers.num_to_end = 1 if turn == 0 else blocks_a_turn
        memory.set_time(memory.now_s + PREDICTED_S)
        assert len(tiers.loads) >= num_blocks - turn - 1
    for _ in range(400):
        memory.set_time(memory.now_s + PREDICTED_S)
    assert not loads.awaits(sequence)
    assert loads.stats.num_late == is_late
    assert loads.stats.num_loads == 1
