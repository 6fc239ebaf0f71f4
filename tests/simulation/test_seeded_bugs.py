"""Bugs planted in the memory and the scheduler are caught by the runner, without any checker.

Each mutation is small and plausible. The accounting laws are switched off, so that what catches it
is that a row reads, or would write, something wrong.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.memory.copy_on_write import CopyOnWrite
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixIndex, PrefixMatch
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, Chunk, EditKind, StepPlan
from quire.simulation.report import add_up
from quire.simulation.simulator import SimulationError, Simulator, run
from quire.simulation.workload import SimulationConfig

Patch = Callable[[pytest.MonkeyPatch], None]

CONFIG = SimulationConfig(
    seed=5,
    num_requests=60,
    num_blocks=24,
    num_groups=2,
    max_num_batched_tokens=16,
    num_branches=(1, 3),
    beam_rate=0.2,
    near_rate=0.4,
    fork_rate=0.1,
    logprobs_rate=0.3,
    overlap=1,
)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Put make(original) in the place of owner.name."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def free_at_once(original: Any) -> Any:
    def free(self: KVCacheManager, sequence: Sequence) -> None:
        sequence.last_step_id = -1  # as if no step in flight read its blocks
        original(self, sequence)

    return free


def release_for_all_holders(original: Any) -> Any:
    def release(self: BlockPool, block: int) -> None:
        while self.ref_count[block]:
            original(self, block)

    return release


def publish_too_early(original: Any) -> Any:
    def admit(self: KVCacheManager, sequence: Sequence, match: PrefixMatch, step_id: int) -> Any:
        copies = original(self, sequence, match, step_id)
        self.publish(sequence, len(sequence.token_ids))
        return copies

    return admit


def match_one_token_too_many(original: Any) -> Any:
    def match(self: PrefixIndex, sequence: Sequence) -> PrefixMatch:
        found: PrefixMatch = original(self, sequence)
        more = found.num_tokens + 1
        if found.partial and more % self.cache.block_size and more < sequence.num_tokens:
            found = found._replace(num_tokens=more)
        return found

    return match


def forget_the_parent(original: Any) -> Any:
    def extend_chain(
        self: PrefixCache, chain: list[bytes], root: bytes, token_ids: list[int], *_: Any
    ) -> list[bytes]:
        size, tokens = self.block_size, []
        while (len(chain) + 1) * size <= len(token_ids):
            first = len(chain) * size
            block: list[bytes] = []
            tokens += original(self, block, root, token_ids[first : first + size])
            chain.extend(block)
        return tokens

    return extend_chain


def same_root_for_all_groups(original: Any) -> Any:
    def find_all(self: PrefixCache, digest: bytes, groups: Tokens[int]) -> tuple[int, ...] | None:
        found = original(self, digest, groups)
        return None if found is None else found[:1] * len(found)

    return find_all


def keep_evicted_content(original: Any) -> Any:
    def take(self: BlockPool, count: int) -> tuple[list[int], list[Any]]:
        taken, _ = original(self, count)
        return taken, []

    return take


def in_plans(change: Callable[[StepPlan], StepPlan]) -> Patch:
    """Every plan is changed on its way to the runner."""

    def make(original: Any) -> Any:
        return lambda self, *given: change(original(self, *given))

    return replace(PlanBuilder, "build", make)


def skip_an_edit(plan: StepPlan) -> StepPlan:
    kept = [edit for edit in plan.table_edits if edit.first_logical_block % 5 != 4]
    return dataclasses.replace(plan, table_edits=tuple(kept))


def swap_groups_in_edits(plan: StepPlan) -> StepPlan:
    edits = [
        edit._replace(group=1 - edit.group) if edit.kind is EditKind.APPEND else edit
        for edit in plan.table_edits
    ]
    return dataclasses.replace(plan, table_edits=tuple(edits))


def reorder_tables(plan: StepPlan) -> StepPlan:
    admit = [
        admission._replace(block_tables=tuple(table[::-1] for table in admission.block_tables))
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


def claim_one_more_computed_block(plan: StepPlan) -> StepPlan:
    admit = [
        admission
        if admission.num_computed_tokens or len(admission.token_ids) <= 8
        else admission._replace(num_computed_tokens=4)
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


def swap_two_tokens(plan: StepPlan) -> StepPlan:
    admit = [
        admission._replace(
            token_ids=[*admission.token_ids[:-2], admission.token_ids[-1], admission.token_ids[-2]]
        )
        if len(admission.token_ids) > admission.num_prompt_tokens + 2
        and admission.num_computed_tokens <= len(admission.token_ids) - 2
        else admission
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


def forget_a_release(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, release=plan.release[1:])


def forget_copies(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, copies=())


def forget_token_edits(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, token_edits=())


def copy_back(plan: StepPlan) -> StepPlan:
    copies = tuple(BlockCopy(copy.target, copy.source) for copy in plan.copies)
    return dataclasses.replace(plan, copies=copies)


def fork_from_another(plan: StepPlan) -> StepPlan:
    if len(plan.forks) < 2:
        return plan
    sources = [fork.source_row for fork in plan.forks]
    forks = [
        fork._replace(source_row=source)
        for fork, source in zip(plan.forks, reversed(sources), strict=True)
    ]
    return dataclasses.replace(plan, forks=tuple(forks))


def never_copy(original: Any) -> Any:
    def is_due(self: CopyOnWrite, sequence: Sequence) -> bool:
        original(self, sequence)
        return False

    return is_due


def let_sources_go(original: Any) -> Any:
    def hold_copied(self: DeferredFrees, step_id: int, copies: list[BlockCopy]) -> None:
        for copy in copies:
            self._pool.release(copy.source)
            if not self._pool.ref_count[copy.source]:
                self._pool.forget(copy.source)  # so it is the next to be taken

    return hold_copied


def keep_own_blocks(original: Any) -> Any:
    def fork(self: KVCacheManager, child: Sequence, parent: Sequence) -> None:
        tables = parent.block_tables
        if child.block_tables and child.num_computed_tokens == parent.num_computed_tokens:
            parent.block_tables = child.block_tables
        original(self, child, parent)
        parent.block_tables = tables

    return fork


def choose_for_another_beam(original: Any) -> Any:
    def add_candidates(self: BeamScheduling, sequence: Sequence, entry: Any) -> Any:
        logprobs = (entry.top_logprobs[0], *entry.top_logprobs[:-1])
        return original(self, sequence, entry._replace(top_logprobs=logprobs))

    return add_candidates


def leave_single_tokens_unnamed(original: Any) -> Any:
    def launch(self: Scheduler, *planned: Any) -> tuple[Any, tuple[Chunk, ...]]:
        step, named = original(self, *planned)
        return step, tuple(chunk for chunk in named if chunk.num_new_tokens != 1)

    return launch


def drop_pauses(original: Any) -> Any:
    def launch(self: Scheduler, *planned: Any) -> tuple[Any, tuple[Chunk, ...]]:
        step, named = original(self, *planned)
        return step, tuple(chunk for chunk in named if chunk.num_new_tokens)

    return launch


MUTATIONS: dict[str, Patch] = {
    "blocks in flight are freed at once": replace(KVCacheManager, "free", free_at_once),
    "a block is released for all its holders": replace(
        BlockPool, "release", release_for_all_holders
    ),
    "blocks are published before they are written": replace(
        KVCacheManager, "admit", publish_too_early
    ),
    "a match has a wrong last token": replace(PrefixIndex, "match", match_one_token_too_many),
    "a hash does not cover its parent": replace(PrefixCache, "extend_chain", forget_the_parent),
    "groups share their blocks": replace(PrefixCache, "find_all", same_root_for_all_groups),
    "evicted content can still be found": replace(BlockPool, "take", keep_evicted_content),
    "an edit is lost": in_plans(skip_an_edit),
    "edits go to the wrong group": in_plans(swap_groups_in_edits),
    "tables are in the wrong order": in_plans(reorder_tables),
    "a block counts as computed that is not": in_plans(claim_one_more_computed_block),
    "a row is not released": in_plans(forget_a_release),
    "a chunk of one token is left out": replace(Scheduler, "_launch", leave_single_tokens_unnamed),
    "a pause is left out": replace(Scheduler, "_launch", drop_pauses),
    "tokens change at a preemption": in_plans(swap_two_tokens),
    "a copy is lost": in_plans(forget_copies),
    "a copy goes the wrong way": in_plans(copy_back),
    "a beam's token is not sent": in_plans(forget_token_edits),
    "forks take the place of each other": in_plans(fork_from_another),
    "a shared block is written": replace(CopyOnWrite, "is_due", never_copy),
    "a source is given out before it is copied": replace(
        DeferredFrees, "hold_copied", let_sources_go
    ),
    "a beam takes over too little": replace(KVCacheManager, "fork", keep_own_blocks),
    "candidates have the wrong scores": replace(
        BeamScheduling, "add_candidates", choose_for_another_beam
    ),
}

BEAMS: dict[str, Any] = {"num_blocks": 160, "beam_rate": 0.6, "max_num_seqs": 12}
BEAM_CONFIG = dataclasses.replace(CONFIG, **BEAMS)
WORLDS: dict[str, Any] = {
    "blocks are published before they are written": {
        "repeat_rate": 0.6,
        "prompt_tokens": (20, 40),
        "num_blocks": 60,
        "max_num_batched_tokens": 8,
    },
    "a source is given out before it is copied": {"near_rate": 1.0},
    "a hash does not cover its parent": {"vocab_size": 3, "block_size": 2},
    "a chunk of one token is left out": {"max_num_batched_tokens": 9, "num_blocks": 48},
    "a beam's token is not sent": BEAMS,
    "forks take the place of each other": {**BEAMS, "beam_rate": 0.0, "num_branches": (2, 3)},
    "a beam takes over too little": BEAMS,
    "candidates have the wrong scores": BEAMS,
}
"""What a mutation needs to show itself, beyond CONFIG."""

NOT_BY_THE_RUNNER = {
    "tokens change at a preemption",
    "a beam's token is not sent",
    "forks take the place of each other",
    "candidates have the wrong scores",
    "a block is released for all its holders",
}
"""The runner believes what plans say of tokens; the comparison with the output alone catches these
(the pool itself, the last)."""

SEEDS = (5, 6, 7, 8)
"""Some bugs need a coincidence; one of these seeds has it."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "_check", lambda self: None)


run_without_bug = functools.cache(run)


def test_without_a_mutation_all_is_well() -> None:
    report = add_up([run_without_bug(config) for config in (CONFIG, BEAM_CONFIG)], seed=5)
    assert report.num_preemptions > 0 and report.num_hit_tokens > 0
    assert report.num_joined_forks > 0 and report.num_cow_blocks > 0 and report.num_beams > 0
    assert report.num_forks > 0 and report.num_partial_hits > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, **WORLDS.get(name, {}))
    run_without_bug(config)
    MUTATIONS[name](monkeypatch)
    message = next(filter(None, map(functools.partial(failure_of, config), SEEDS)), None)
    assert message is not None, "no check noticed"
    assert "the last plans, for " in message or name in NOT_BY_THE_RUNNER, message


def failure_of(config: SimulationConfig, seed: int) -> str | None:
    """What a simulation fails with; None if it does not, or if the memory stumbles by itself."""
    try:
        run(dataclasses.replace(config, seed=seed))
    except KeyError:
        return None
    except SimulationError as error:
        assert str(error).startswith(f"seed {seed}, after ")
        return str(error)
    return None
