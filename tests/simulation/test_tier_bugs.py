"""Bugs planted in the moves between the pool and a tier are caught by the simulation.

As in `test_seeded_bugs`, with which this shares what it does. Loads only fill the prefix cache, so
many a bug would only cost time; these give wrong tokens, lose blocks, or wait for ever.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from tests.simulation.test_seeded_bugs import Patch, failure_of, replace

from quire.core.memory.tiers import loads, write_behind
from quire.core.memory.tiers.block_moves import BlockMoves
from quire.core.memory.tiers.contract import MoveEnd, StoreOrder
from quire.core.memory.tiers.loads import Loads
from quire.core.memory.tiers.write_behind import WriteBehind
from quire.core.scheduling import scheduler
from quire.core.sequence import Sequence
from quire.simulation import simulator
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=5,
    num_requests=80,
    num_blocks=40,
    num_groups=2,
    max_num_batched_tokens=32,
    shared_prefix_rate=0.4,
    near_rate=0.4,
    repeat_rate=0.4,
    crash_rate=0.01,
    overlap=1,
    tier=(("block_s", 1e-5), ("latency_s", 0.01), ("failure_rate", 0.05), ("slow_rate", 0.1)),
)


def both(*patches: Patch) -> Patch:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in patches:
            patch(monkeypatch)

    return plant


def always(value: object) -> Callable[[Any], Any]:
    return lambda original: lambda *given, **more: value


def never(original: Any) -> Any:
    return lambda *given, **more: None


def publish_at_once(original: Any) -> Any:
    def order(self: Loads, *given: Any) -> None:
        original(self, *given)
        for filling in self._by_order.values():
            self._publish(filling)

    return order


def call_it_done(original: Any) -> Any:
    return lambda self, end, now_s: original(self, end._replace(is_done=True), now_s)


def give_back_at_once(original: Any) -> Any:
    """Blocks that nothing waits for any more, although the tier may still fill them."""

    def leave(self: Loads, *given: Any, **more: Any) -> None:
        original(self, *given, **more)
        for filling in self._by_order.values():
            if not filling.waiters and not filling.has_landed:
                filling.has_landed = True
                self._pool.release(filling.block)

    return leave


def land_unless_given_back(original: Any) -> Any:
    def finish_order(self: Loads, end: MoveEnd, now_s: float) -> None:
        filling = self._by_order[end.order_id]
        if not filling.has_landed:
            original(self, end, now_s)
            return
        del self._by_order[end.order_id], self._by_content[filling.wanted[:2]]

    return finish_order


def hold_no_stored_block(original: Any) -> Any:
    def order(self: WriteBehind, block: int, key: Any) -> StoreOrder:
        made: StoreOrder = original(self, block, key)
        self._pool.release(block)
        return made

    return order


def end_without_release(original: Any) -> Any:
    def end(self: WriteBehind, order_id: int, *, is_done: bool) -> None:
        self._storing.discard(self.in_flight.pop(order_id))

    return end


def store_under_the_name_before(original: Any) -> Any:
    """What a block has got since is stored as what was published of it."""

    def orders(self: WriteBehind, now_s: float, *, at_once: bool = False) -> list[StoreOrder]:
        self._collect_published(now_s)
        self._end_delays(now_s, at_once=at_once)
        found = []
        while self._ready and now_s % 0.1 > 0.05:  # a little late
            block, key = self._ready.popitem(last=False)
            if block not in self._storing and not self._tiers.find(*key):
                found.append(self._order(block, key))
        return found

    return orders


def of_the_first_group(original: Any) -> Any:
    return lambda order_id, block, group, name: original(order_id, block, 0, name)


class OneTokenTooMany(StoreOrder):
    """Of a partly filled block, the last token counts twice."""

    def __new__(cls, *given: Any) -> Any:
        made = StoreOrder(*given)
        return made._replace(tokens=made.tokens + made.tokens[-4:])


def keep_what_was_there(original: Any) -> Any:
    """The blocks of the pool that a load holds are never let go."""

    def release(self: Loads, sequence: Sequence, num_admitted_tokens: int = 0) -> None:
        load = self._loads.get(sequence)
        if load is not None:
            load.there = ()
        original(self, sequence, num_admitted_tokens)

    return release


def release_of_admitted_alone(original: Any) -> Any:
    def release(self: Loads, sequence: Sequence, num_admitted_tokens: int = 0) -> None:
        if num_admitted_tokens:
            original(self, sequence, num_admitted_tokens)

    return release


def hold_the_older_block_of_another(original: Any) -> Any:
    """A content is known by now: its block is used in place of ours, but not held."""

    def publish(self: Loads, filling: Any) -> None:
        known = self._cache.find(*filling.wanted[:2])
        if known is None:
            original(self, filling)
            return
        self._pool.release(filling.block)
        filling.block = known

    return publish


def file_under_another_prefix(original: Any) -> Any:
    last: list[bytes] = []

    def publish(self: Loads, filling: Any) -> None:
        wanted = filling.wanted
        if last and not wanted.is_first:
            filling.wanted = wanted._replace(parent=last[-1])
        last.append(wanted.name)
        original(self, filling)

    return publish


def wake_one_waiter(original: Any) -> Any:
    def finish_order(self: Loads, end: MoveEnd, now_s: float) -> None:
        waiters = self._by_order[end.order_id].waiters
        missed = sorted(waiters, key=lambda sequence: sequence.request_id)[1:]
        original(self, end, now_s)
        for sequence in missed:
            self._loads[sequence].num_pending += 1

    return finish_order


MUTATIONS: dict[str, Patch] = {
    "a block is published before its load has ended": replace(Loads, "_order", publish_at_once),
    "a load that failed is published": replace(Loads, "finish_order", call_it_done),
    "a block is given back while it is filled": both(
        replace(Loads, "_stop_waiting", give_back_at_once),
        replace(Loads, "finish_order", land_unless_given_back),
    ),
    "a block is not held while it is stored": both(
        replace(WriteBehind, "_order", hold_no_stored_block),
        replace(WriteBehind, "end", end_without_release),
    ),
    "a stored block is held for ever": replace(WriteBehind, "end", end_without_release),
    "a block is stored under the name that it had": replace(
        WriteBehind, "orders", store_under_the_name_before
    ),
    "all groups load what the first has": replace(loads, "LoadOrder", of_the_first_group),
    "a partly filled block is stored with a token too many": lambda monkeypatch: (
        monkeypatch.setattr(write_behind, "StoreOrder", OneTokenTooMany)
    ),
    "what a load holds of the pool is never let go": replace(Loads, "release", keep_what_was_there),
    "a request that is aborted leaves its load": replace(
        Loads, "release", release_of_admitted_alone
    ),
    "a block that was published meanwhile is not held": replace(
        Loads, "_publish", hold_the_older_block_of_another
    ),
    "what was loaded is filed under another prefix": replace(
        Loads, "_publish", file_under_another_prefix
    ),
    "only one of those that wait for a load goes on": both(
        replace(Loads, "finish_order", wake_one_waiter), replace(Loads, "end_late", never)
    ),
    "blocks are expected that never come": lambda monkeypatch: monkeypatch.setattr(
        BlockMoves, "num_free_soon", 1000
    ),
    "the scheduler forgets that blocks are moved": replace(
        scheduler, "_moves_blocks", always(False)
    ),
}

TINY: dict[str, Any] = {"num_blocks": 26, "max_num_seqs": 8}
ALIKE: dict[str, Any] = {"near_rate": 0.9, "repeat_rate": 0.0, "crash_rate": 0.05, "block_size": 8}
WORLDS: dict[str, Any] = {
    "a partly filled block is stored with a token too many": ALIKE | {"vocab_size": 2},
    "what was loaded is filed under another prefix": ALIKE | {"shared_prefix_rate": 0.8},
    "only one of those that wait for a load goes on": {
        "num_requests": 30,
        "crash_rate": 0.05,
        "shared_prefix_rate": 0.9,
        "repeat_rate": 0.8,
        "num_branches": (2, 4),
        "requests_per_s": 40.0,
        "tier": (("block_s", 1e-3), ("latency_s", 0.05)),
    },
    "blocks are expected that never come": TINY,
    "the scheduler forgets that blocks are moved": TINY
    | {"tier": (("block_s", 0.05), ("latency_s", 0.5))},
}
"""What a mutation needs to show itself, beyond CONFIG."""

SEEDS = (5, 6, 7, 8, 13, 1, 3, 9)
"""Some bugs need a coincidence; one of these seeds has it."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws of accounting are not what catches a bug, and nothing waits for long."""
    monkeypatch.setattr(Simulator, "_check", lambda self: None)
    monkeypatch.setattr(simulator, "MAX_IDLE_TURNS", 2_000)


run_without_bug = functools.cache(run)


@pytest.mark.parametrize("name", ["", *WORLDS])
def test_without_a_mutation_all_is_well(name: str) -> None:
    report = run_without_bug(config_of(name))
    assert report.num_loads > 0 and report.num_stored_blocks > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    run_without_bug(config)
    MUTATIONS[name](monkeypatch)
    assert any(map(functools.partial(failure_of, config), SEEDS)), "no check noticed"


def config_of(name: str) -> SimulationConfig:
    return dataclasses.replace(CONFIG, **WORLDS.get(name, {}))
