"""Bugs planted in the memory of windows, latents and states are caught by the fake runner.

As in `test_seeded_bugs`, with which this shares what it does: the accounting laws are switched off,
so that what catches a bug is that a row reads, or would write, something wrong.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from tests.simulation.test_seeded_bugs import Patch, failure_of, in_plans, replace

from quire.core.kv_groups import KVKind
from quire.core.memory import growth, state_snapshots
from quire.core.memory.copy_on_write import CopyOnWrite
from quire.core.memory.group_match import NOTHING, GroupMatch, GroupPart, StatePages
from quire.core.memory.growth import Growth, StateRule, WindowRule
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixIndex
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.scheduling.running_set import RunningSet
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, EditKind, StepPlan
from quire.simulation.report import add_up
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=5,
    num_requests=60,
    num_blocks=90,
    kinds="full,window:9,latent,state:3",
    snapshot_tokens=8,
    max_num_batched_tokens=16,
    num_branches=(1, 3),
    beam_rate=0.1,
    near_rate=0.4,
    repeat_rate=0.2,
    fork_rate=0.1,
    overlap=1,
)


def both(*patches: Patch) -> Patch:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in patches:
            patch(monkeypatch)

    return plant


def always(value: object) -> Callable[[Any], Any]:
    return lambda original: lambda *given, **more: value


def one_block_more(original: Any) -> Any:
    return lambda self, num_tokens: original(self, num_tokens) + (num_tokens > self.window)


def pass_what_is_in_flight(original: Any) -> Any:
    def forget_passed(self: KVCacheManager, sequence: Sequence) -> Any:
        num_published = sequence.num_published_blocks
        sequence.num_published_blocks = sequence.num_computed_tokens // self.block_size
        edits = original(self, sequence)
        sequence.num_published_blocks = num_published
        return edits

    return forget_passed


def ask_for_the_last_block_alone(original: Any) -> Any:
    def longest(self: WindowRule, most: int, has: Callable[[int], bool]) -> int:
        while most and not has(most):
            most -= 1
        return most

    return longest


def take_an_older_state(original: Any) -> Any:
    def states(self: GroupMatch, chains: Any, num_blocks: int) -> StatePages | None:
        found = (original(self, chains, count) for count in range(num_blocks, 0, -1))
        return next(filter(None, found), None)

    return states


def see_no_window(original: Any) -> Any:
    def part(self: GroupMatch, *given: Any) -> Any:
        windows, self._growth.windows = self._growth.windows, ()
        try:
            return original(self, *given)
        finally:
            self._growth.windows = windows

    return part


def take_any_state(original: Any) -> Any:
    """The state that a partly filled block was left with, wherever that ended."""

    def part(
        self: GroupMatch, chains: Any, index: int, num_common: int, digest: bytes, partial: Any
    ) -> GroupPart:
        found = self._snapshots.find(digest)
        if found is None or not num_common:
            return NOTHING
        return GroupPart(index * self._growth.block_size + num_common, partial, found)

    return part


def find_parts(original: Any) -> Any:
    """Also where a state would need the whole."""

    def closest_block(self: PrefixCache, parent: bytes, token_ids: Any, **_: bool) -> Any:
        return original(self, parent, token_ids)

    return closest_block


def leave_states_shared(original: Any) -> Any:
    def shared_entries(self: CopyOnWrite, sequence: Sequence) -> Iterator[tuple[int, int, int]]:
        for group, index, block in original(self, sequence):
            if self._growth.rules[group].has_slots or self._is_kept(block):
                yield group, index, block

    return shared_entries


def publish_a_state_that_goes_on(original: Any) -> Any:
    def publish(self: PrefixIndex, sequence: Sequence, num_confirmed_tokens: int) -> None:
        original(self, sequence, num_confirmed_tokens)
        if self._snapshots.stops_at(sequence, num_confirmed_tokens):
            last = num_confirmed_tokens // self.cache.block_size - 1
            self._snapshots.publish(sequence, sequence.chain[last])

    return publish


def keep_no_states(original: Any) -> Any:
    def release_tail(self: KVCacheManager, sequence: Sequence, *wanted: int) -> int:
        num_freed: int = original(self, sequence, *wanted)
        if sequence.num_computed_tokens and not self.deferred.is_in_flight(sequence.last_step_id):
            sequence.shares_tail = False
            for rule in self.growth.states:
                table = sequence.block_tables[rule.group]
                self.pool.release_all(table)
                table.clear()
        return num_freed

    return release_tail


def remember_pages(original: Any) -> Any:
    """Of a state, only the last page is looked up."""
    of_all: WeakKeyDictionary[StateSnapshots, dict[bytes, Any]] = WeakKeyDictionary()

    def find(self: StateSnapshots, digest: bytes) -> Any:
        known = of_all.setdefault(self, {})
        found = original(self, digest)
        if found is not None:
            known[digest] = found
        last = self._cache.find(self._rules[0].group, state_snapshots.page_name(digest, 2))
        is_same = last is not None and digest in known and known[digest][0][2] == last
        return known[digest] if is_same else found

    return find


def let_go_of_states_in_flight(original: Any) -> Any:
    def truncate(self: KVCacheManager, sequence: Sequence, num_kept: int) -> int:
        if not num_kept and self.deferred.is_in_flight(sequence.last_step_id):
            for rule in self.growth.states if sequence.block_tables else ():
                table = sequence.block_tables[rule.group]
                self.pool.release_all(table)
                table.clear()
        freed: int = original(self, sequence, num_kept)
        return freed

    return truncate


def keep_what_a_failed_step_left(original: Any) -> Any:
    def drop_rows(self: RunningSet) -> None:
        rules = self._memory.growth
        states, rules.states = rules.states, ()
        can_keep, StateRule.can_keep = StateRule.can_keep, always(True)(None)  # type: ignore[method-assign]
        try:
            original(self)
        finally:
            rules.states, StateRule.can_keep = states, can_keep  # type: ignore[method-assign]

    return drop_rows


def end_all_names_alike(original: Any) -> Any:
    return lambda digest, index: original(digest, 0)


def leave_holes_in_latents(original: Any) -> Any:
    def rule_of(group: int, description: Any, block_size: int) -> Any:
        if description.kind is KVKind.LATENT:
            return WindowRule(group, block_size, 9)
        return original(group, description, block_size)

    return rule_of


def without(kind: EditKind) -> Callable[[StepPlan], StepPlan]:
    def drop(plan: StepPlan) -> StepPlan:
        kept = [edit for edit in plan.table_edits if edit.kind is not kind]
        return dataclasses.replace(plan, table_edits=tuple(kept))

    return drop


def forget_every_other_copy(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, copies=plan.copies[::2])


def mix_up_targets(plan: StepPlan) -> StepPlan:
    """The pages of states change places."""
    targets = [copy.target for copy in plan.copies]
    copies = map(BlockCopy, [copy.source for copy in plan.copies], targets[1:] + targets[:1])
    return dataclasses.replace(plan, copies=tuple(copies))


def claim_a_state(plan: StepPlan) -> StepPlan:
    """The first tokens of a new row count as computed, as if its blocks came with them."""
    admit = [
        admission
        if admission.num_computed_tokens or len(admission.token_ids) < 3
        else admission._replace(num_computed_tokens=1)
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


MUTATIONS: dict[str, Patch] = {
    "a hole is made one block early": replace(WindowRule, "first_needed", one_block_more),
    "a window's block goes while a step in flight reads it": replace(
        KVCacheManager, "forget_passed", pass_what_is_in_flight
    ),
    "a hit lacks the run of its window": replace(
        WindowRule, "longest", ask_for_the_last_block_alone
    ),
    "a part of a block is hit without its window": replace(GroupMatch, "part", see_no_window),
    "a hit goes on from the state of a shorter prefix": replace(
        GroupMatch, "states", take_an_older_state
    ),
    "a part of a block is hit with any state": both(
        replace(GroupMatch, "part", take_any_state),
        replace(PrefixCache, "closest_block", find_parts),
    ),
    "a snapshot is written in its place": replace(CopyOnWrite, "_is_kept", always(False)),
    "a fork's state is written in its place": replace(
        CopyOnWrite, "_shared_entries", leave_states_shared
    ),
    "a snapshot is published while its sequence goes on": both(
        replace(StateSnapshots, "awaits", always(False)),
        replace(PrefixIndex, "publish", publish_a_state_that_goes_on),
    ),
    "a cut leaves the state ahead": replace(StateRule, "can_keep", always(True)),
    "a cut leaves a window with holes": replace(WindowRule, "can_keep", always(True)),
    "a preempted sequence keeps its tokens but not its state": replace(
        KVCacheManager, "release_tail", keep_no_states
    ),
    "a snapshot is used that was evicted in part": both(
        replace(StateSnapshots, "find", remember_pages),
        replace(StateSnapshots, "forget_rest", always(None)),
    ),
    "states in flight are freed at once": replace(
        KVCacheManager, "truncate", let_go_of_states_in_flight
    ),
    "a state is kept that a failed step was to write": replace(
        RunningSet, "drop_rows", keep_what_a_failed_step_left
    ),
    "all pages of a state have one name": replace(
        state_snapshots, "page_name", end_all_names_alike
    ),
    "latents are cut like windows": replace(growth, "rule_of", leave_holes_in_latents),
    "holes are not sent": in_plans(without(EditKind.HOLE)),
    "replaced pages are not sent": in_plans(without(EditKind.REPLACE)),
    "some pages are not copied": in_plans(forget_every_other_copy),
    "pages are copied to the wrong place": in_plans(mix_up_targets),
    "a row goes on from a state that it does not have": in_plans(claim_a_state),
}


FAILING: dict[str, Any] = {"step_failure_rate": 0.1}
WINDOWS: dict[str, Any] = {"kinds": "full,window:9", "num_blocks": 50, "near_rate": 0.9}
STATES: dict[str, Any] = {
    "kinds": "full,state:3",
    "num_blocks": 50,
    "near_rate": 0.9,
    "abort_rate": 0.5,
    "max_abort_age_steps": 6,
}
WORLDS: dict[str, Any] = {
    "a state is kept that a failed step was to write": FAILING,
    "a hit lacks the run of its window": WINDOWS,
    "a part of a block is hit without its window": WINDOWS,
    "a cut leaves a window with holes": WINDOWS,
    "a snapshot is used that was evicted in part": STATES,
    "states in flight are freed at once": STATES,
}
"""What a mutation needs to show itself, beyond CONFIG."""

NOT_BY_THE_RUNNER = {"a snapshot is written in its place"}
"""The pool itself refuses a second content of a page."""

SEEDS = (5, 6, 7, 8)
"""Some bugs need a coincidence; one of these seeds has it."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "_check", lambda self: None)


run_without_bug = functools.cache(run)


def test_without_a_mutation_all_is_well() -> None:
    report = add_up([run_without_bug(config_of(name)) for name in ("", *WORLDS)], seed=5)
    assert report.num_preemptions > 0 and report.num_hit_tokens > 0
    assert report.num_cow_blocks > 0 and report.num_beams > 0 and report.num_failed_steps > 0
    assert report.num_forks > 0 and report.num_joined_forks > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    run_without_bug(config)
    MUTATIONS[name](monkeypatch)
    message = next(filter(None, map(functools.partial(failure_of, config), SEEDS)), None)
    assert message is not None, "no check noticed"
    assert "the last plans, for " in message or name in NOT_BY_THE_RUNNER, message


def config_of(name: str) -> SimulationConfig:
    return dataclasses.replace(CONFIG, **WORLDS.get(name, {}))


def test_growth_is_what_the_mutations_change() -> None:
    """Each kind has its own rule in the worlds above."""
    rules = Growth(CONFIG.groups, CONFIG.block_size).rules
    assert [type(rule).__name__ for rule in rules] == [
        "FullRule",
        "WindowRule",
        "FullRule",
        "StateRule",
    ]
