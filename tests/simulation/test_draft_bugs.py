"""Bugs planted in the planning and confirmation of drafts are caught, without any checker.

As in `test_seeded_bugs`, with which this shares what it does: the accounting laws are switched off,
so that what catches a bug is that a row reads, or would write, something wrong.
"""

import dataclasses
import functools
from typing import Any

import pytest
from tests.simulation.test_hybrid_bugs import both
from tests.simulation.test_seeded_bugs import Patch, failure_of, in_plans, replace

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling import drafts as drafting
from quire.core.scheduling import scheduler as scheduling
from quire.core.scheduling.draft_lengths import DraftCandidate, DraftChoice
from quire.core.scheduling.drafts import Drafting
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.running_set import AppendSlots, RunningSet
from quire.core.scheduling.step_results import StepInFlight
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult
from quire.engine.token_masks import GrammarConstraint
from quire.simulation.fakes.fake_step import FakeStep
from quire.simulation.fakes.fake_store import FakeStore
from quire.simulation.report import add_up
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=5,
    num_requests=50,
    num_blocks=40,
    max_num_batched_tokens=24,
    num_branches=(1, 3),
    near_rate=0.4,
    fork_rate=0.1,
    logprobs_rate=0.3,
    max_drafts=6,
    overlap=1,
)


def confirm_with(count: Any) -> Any:
    """count(sequence, the drafts) -> the tokens that count as computed and confirmed."""

    def make(original: Any) -> Any:
        def confirm(self: Drafting, step: StepInFlight, row: int) -> None:
            sequence, _, planned = step.rows[row]
            if sequence.row is None or sequence.num_computed_tokens != planned:
                return original(self, step, row)
            original(self, step, row)
            assert step.drafts is not None
            count(self, sequence, planned + len(step.drafts[row].token_ids))
            return None

        return confirm

    return make


def count_all_as_computed(self: Drafting, sequence: Sequence, planned: int) -> None:
    sequence.num_computed_tokens = planned


def pass_windows_by_what_was_planned(self: Drafting, sequence: Sequence, planned: int) -> None:
    published, size = sequence.num_published_blocks, self._memory.block_size
    sequence.num_published_blocks = planned // size
    self._running_set._builder.edit_tables(self._memory.forget_passed(sequence))
    sequence.num_published_blocks = published


def publish_before_the_result(original: Any) -> Any:
    """By the planned count, as if all drafts were the sequence's tokens."""

    def confirm(
        self: StepInFlight, result: StepResult, plain_tokens: list[Any], memory: KVCacheManager
    ) -> None:
        original(self, result, plain_tokens, memory)
        for row, drafts in (self.drafts or {}).items():
            sequence, num_admissions, planned = self.rows[row]
            if sequence.row is None or sequence.num_admissions != num_admissions:
                continue
            known = list(sequence.token_ids)
            sequence.token_ids += drafts.token_ids
            memory.publish(sequence, planned + len(drafts.token_ids))
            sequence.token_ids[:] = known

    return confirm


def confirm_whatever_happened(original: Any) -> Any:
    """Also of a sequence that was preempted since the step began."""

    def confirm(self: Drafting, step: StepInFlight, row: int) -> None:
        sequence = step.rows[row][0]
        original(self, step, row)
        if sequence.block_tables and sequence.row is None:
            sequence.num_computed_tokens = len(sequence.token_ids) - 1

    return confirm


def confirm_accepted_drafts(original: Any) -> Any:
    """As in models without states."""

    def confirm(self: Drafting, step: StepInFlight, row: int) -> None:
        self._has_states = False
        original(self, step, row)
        self._has_states = True

    return confirm


def swallow_drafts(original: Any) -> Any:
    """States are those after the drafts, but pass for those before."""

    def advance_states(self: FakeStore, step: FakeStep) -> None:
        original(self, step)
        store = self._slots.reshape(-1, self._block_size)
        for each in step.rows:
            for group, pages in each.pages.items():
                salts = self._page_salts(group, len(pages))
                store[pages] = (each.fingerprints[each.end - 1] ^ salts)[:, None]

    return advance_states


def forget_replays(original: Any) -> Any:
    """Drafts are planned as if the row lacked one token."""

    def launch(self: Drafting, step: StepInFlight) -> Any:
        self._planned = [(sequence, proposal, 1) for sequence, proposal, _ in self._planned]
        return original(self, step)

    return launch


def do_not_wait(original: Any) -> Any:
    return lambda self, sequence: False


def without_pending(original: Any) -> Any:
    """Drafts follow tokens of which the last is in flight."""

    def plan(self: Drafting, chunks: Any, budget: StepBudget) -> None:
        pending = [(each, each.num_pending_tokens) for each in self._running_set.running]
        for sequence, count in pending:
            if count == 1 and sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.num_pending_tokens = 0
                sequence.num_computed_tokens -= 1
        original(self, chunks, budget)
        for sequence, count in pending:
            if sequence.num_pending_tokens != count:
                sequence.num_pending_tokens = count
                sequence.num_computed_tokens += 1

    return plan


def draft_for_parents(original: Any) -> Any:
    def may_have_drafts(self: Drafting, sequence: Sequence) -> bool:
        forks, sequence.forks = sequence.forks, []
        try:
            return bool(original(self, sequence))
        finally:
            sequence.forks = forks

    return may_have_drafts


def draft_beyond_the_end(original: Any) -> Any:
    def plan(self: Drafting, chunks: Any, budget: StepBudget) -> None:
        running = self._running_set.running
        limits = [(sequence, sequence.max_num_tokens) for sequence in running]
        for sequence, limit in limits:
            sequence.max_num_tokens = limit + 9
        original(self, chunks, budget)
        for sequence, limit in limits:
            sequence.max_num_tokens = limit

    return plan


def send_no_edits(original: Any) -> Any:
    def reserve(self: AppendSlots, sequence: Sequence, num_tokens: int) -> None:
        self._memory.grow(sequence, sequence.num_computed_tokens + 1 + num_tokens)

    return reserve


def get_no_slots(original: Any) -> Any:
    return lambda self, sequence, num_tokens: None


def take_blocks_of_drafts_in_flight(original: Any) -> Any:
    def reclaim_reserves(self: RunningSet, num_wanted: int) -> None:
        drafts = [(sequence, sequence.draft_token_ids) for sequence in self.running]
        for sequence, _ in drafts:
            sequence.draft_token_ids = ()
        original(self, num_wanted)
        for sequence, token_ids in drafts:
            sequence.draft_token_ids = token_ids

    return reclaim_reserves


def free_drafts_at_once(original: Any) -> Any:
    def truncate(self: KVCacheManager, sequence: Sequence, num_kept: int) -> int:
        last_step_id = sequence.last_step_id
        if sequence.draft_token_ids:
            sequence.last_step_id = -1
        num_freed: int = original(self, sequence, num_kept)
        sequence.last_step_id = last_step_id
        return num_freed

    return truncate


def keep_all_tokens(original: Any) -> Any:
    """Also those behind the one with which the sequence ends."""

    def extend(sequence: Sequence, token_ids: Any, logprobs: Any) -> Any:
        return original(sequence, token_ids, logprobs)._replace(token_ids=token_ids)

    return extend


def cut_by_grammars_alone(original: Any) -> Any:
    def num_useful(sequence: Sequence, drafts: tuple[int, ...]) -> int:
        ends, sequence.end_token_ids = sequence.end_token_ids, frozenset()
        found: int = original(sequence, drafts)
        sequence.end_token_ids = ends
        return found

    return num_useful


def keep_the_first_logprobs(original: Any) -> Any:
    def extend(sequence: Sequence, token_ids: Any, logprobs: Any) -> Any:
        first = None if logprobs is None else logprobs[:1] * len(token_ids)
        return original(sequence, token_ids, first)

    return extend


def append_only_the_first(original: Any) -> Any:
    return lambda sequence, token_ids, logprobs: original(
        sequence, token_ids[:1], logprobs and logprobs[:1]
    )


def one_mask_for_all(original: Any) -> Any:
    def masks(self: GrammarConstraint, drafts: Any) -> Any:
        found = original(self, drafts)
        return found and found[:1] * len(found)

    return masks


def take_all_drafts(original: Any) -> Any:
    def choose_lengths(candidates: list[DraftCandidate], budget: StepBudget) -> DraftChoice:
        return DraftChoice([len(candidate.survival) for candidate in candidates], 0.0)

    return choose_lengths


def compute_one_token_less(plan: StepPlan) -> StepPlan:
    chunks = [
        chunk._replace(num_new_tokens=chunk.num_new_tokens - 1) if chunk.draft_token_ids else chunk
        for chunk in plan.chunks
    ]
    num_drafting = sum(bool(chunk.draft_token_ids) for chunk in plan.chunks)
    return dataclasses.replace(
        plan, chunks=tuple(chunks), num_tokens=plan.num_tokens - num_drafting
    )


def leave_the_pause_out(plan: StepPlan) -> StepPlan:
    chunks = tuple(chunk for chunk in plan.chunks if chunk.num_new_tokens)
    return dataclasses.replace(plan, chunks=chunks)


MUTATIONS: dict[str, Patch] = {
    "rejected drafts count as computed": replace(
        Drafting, "confirm", confirm_with(count_all_as_computed)
    ),
    "a window passes what was planned": replace(
        Drafting, "confirm", confirm_with(pass_windows_by_what_was_planned)
    ),
    "blocks are published by the planned count": replace(
        StepInFlight, "confirm", publish_before_the_result
    ),
    "a preempted sequence keeps its drafts": replace(
        Drafting, "confirm", confirm_whatever_happened
    ),
    "accepted drafts count as computed, but the state is before them": replace(
        Drafting, "confirm", confirm_accepted_drafts
    ),
    "a state has the drafts in it": replace(FakeStore, "advance_states", swallow_drafts),
    "a replay is taken for a decoding row": replace(Drafting, "launch", forget_replays),
    "a row does not wait for its drafts": replace(Drafting, "awaits", do_not_wait),
    "drafts follow a token in flight": replace(Drafting, "plan", without_pending),
    "a parent of waiting forks has drafts": replace(
        Drafting, "_may_have_drafts", draft_for_parents
    ),
    "drafts go beyond the end": replace(Drafting, "plan", draft_beyond_the_end),
    "new blocks of drafts are not sent": replace(AppendSlots, "reserve", send_no_edits),
    "drafts have no slots": replace(AppendSlots, "reserve", get_no_slots),
    "blocks of drafts in flight are taken": replace(
        RunningSet, "_reclaim_reserves", take_blocks_of_drafts_in_flight
    ),
    "blocks of drafts in flight are freed at once": replace(
        KVCacheManager, "truncate", free_drafts_at_once
    ),
    "tokens behind the end are returned": both(
        replace(drafting, "num_useful", cut_by_grammars_alone),
        replace(scheduling, "extend", keep_all_tokens),
    ),
    "all tokens have the first's log-probabilities": replace(
        scheduling, "extend", keep_the_first_logprobs
    ),
    "only the first sampled token is kept": replace(scheduling, "extend", append_only_the_first),
    "all positions have the first's mask": replace(GrammarConstraint, "masks", one_mask_for_all),
    "drafts are beside the budget": replace(drafting, "choose_lengths", take_all_drafts),
    "a chunk is shorter than its drafts": in_plans(compute_one_token_less),
    "a pause is left out": in_plans(leave_the_pause_out),
}

FULL: dict[str, Any] = {"num_blocks": 18, "requests_per_s": 200.0, "draft_error_rate": 0.6}
STATES: dict[str, Any] = {"kinds": "full,state:2", "num_blocks": 120}
WORLDS: dict[str, Any] = {
    "a window passes what was planned": {"kinds": "full,window:5", "num_blocks": 80},
    "blocks are published by the planned count": {
        "vocab_size": 3,
        "end_rate": 0.0,
        "near_rate": 0.9,
        "draft_error_rate": 0.6,
        "block_size": 1,
        "num_blocks": 160,
        "prompt_tokens": (1, 12),
        "num_requests": 120,
        "num_cache_domains": 1,
    },
    "a preempted sequence keeps its drafts": FULL,
    "accepted drafts count as computed, but the state is before them": STATES,
    "a state has the drafts in it": STATES,
    "a replay is taken for a decoding row": STATES,
    "blocks of drafts in flight are taken": FULL,
    "blocks of drafts in flight are freed at once": FULL,
    "drafts go beyond the end": {"max_model_len": 24},
    "all positions have the first's mask": {"grammar_rate": 1.0, "vocab_size": 50},
    "tokens behind the end are returned": {"end_rate": 0.1},
}
"""What a mutation needs to show itself, beyond CONFIG."""

NOT_BY_THE_RUNNER = {
    "rejected drafts count as computed",
    "tokens behind the end are returned",
    "all tokens have the first's log-probabilities",
    "only the first sampled token is kept",
    "all positions have the first's mask",
    "drafts are beside the budget",
}
"""What is returned is compared with the output alone, the simulator bounds a step's tokens, and the
scheduler counts the rows that sample."""

SEEDS = (5, 6, 7, 8, 9)
"""Some bugs need a coincidence; one of these seeds has it."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "_check", lambda self: None)


run_without_bug = functools.cache(run)


def config_of(name: str) -> SimulationConfig:
    return dataclasses.replace(CONFIG, **WORLDS.get(name, {}))


def test_without_a_mutation_all_is_well() -> None:
    report = add_up([run_without_bug(config_of(name)) for name in ("", *WORLDS)], seed=5)
    assert 0 < report.num_accepted_drafts < report.num_drafts
    assert report.num_preemptions > 0 and report.num_hit_tokens > 0 and report.num_forks > 0
    assert report.num_joined_forks > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    run_without_bug(config)
    MUTATIONS[name](monkeypatch)
    message = next(filter(None, map(functools.partial(failure_of, config), SEEDS)), None)
    assert message is not None, "no check noticed"
    assert "the last plans, for " in message or name in NOT_BY_THE_RUNNER, message


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_behind_an_end_token_change_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cut because they are useless, not because they would do harm."""
    replace(drafting, "num_useful", cut_by_grammars_alone)(monkeypatch)
    report = run(dataclasses.replace(CONFIG, seed=seed, end_rate=0.1, stop_rate=0.3))
    assert report.num_accepted_drafts > 0
