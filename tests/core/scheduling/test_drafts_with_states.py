"""Drafts in models with recurrent states: accepted ones are computed again from the state."""

import pytest
from tests.core.harness import Harness
from tests.core.scheduling.test_drafts import drafting_of, drafts_of, with_drafts
from tests.core.scheduling.test_pacing import make_pacer

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.scheduling.draft_lengths import DraftCandidate, choose_lengths
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import StepBudget, StepDemand
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import SequenceState
from quire.core.step import Chunk
from quire.simulation.workload import read_groups


def hybrid(num_blocks: int = 80, kinds: str = "full,state:2") -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(read_groups(kinds), num_blocks, 4, secret=b"secret"))


def test_accepted_drafts_are_computed_again_in_front_of_the_next_ones() -> None:
    harness = Harness(hybrid())
    with_drafts(harness)
    sequence = harness.add("a", 4, 14)
    harness.step()
    plan = harness.launch()
    expected = harness.expected["a"][0]
    assert plan.chunks == (Chunk(0, 4, expected[1:4]),)
    harness.land()
    assert (len(sequence.token_ids), sequence.num_computed_tokens) == (9, 5)
    assert (sequence.num_confirmed_tokens, sequence.num_published_blocks) == (5, 1)
    plan = harness.launch()
    assert plan.chunks == (Chunk(0, 4 + 3, expected[5:8]),) and plan.num_tokens == 7
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 9)
    harness.land()
    assert (len(sequence.token_ids), sequence.num_computed_tokens) == (13, 9)
    harness.run()
    drafting = drafting_of(harness)
    assert drafting.num_drafts == drafting.num_accepted_drafts == 3 + 3 + 3


def test_a_row_whose_drafts_were_rejected_decodes_from_the_same_state() -> None:
    harness = Harness(hybrid())
    oracle = with_drafts(harness, wrong=[1])
    sequence = harness.add("a", 4, 12)
    harness.step()
    assert drafts_of(harness.step()) == {0: 3}
    assert (len(sequence.token_ids), sequence.num_computed_tokens) == (6, 5)
    oracle.names = set()
    assert harness.step().chunks == ()
    harness.run()


def test_replays_come_before_prompts_and_take_several_steps_if_they_must() -> None:
    harness = Harness(hybrid(), budget=6)
    oracle = with_drafts(harness, most=5)
    sequence = harness.add("a", 3, 20)
    harness.step()
    assert drafts_of(harness.step()) == {0: 5}
    harness.add("b", 30, 4)
    plan = harness.launch()
    assert plan.chunks == (Chunk(0, 6),)
    harness.land()
    oracle.names = set()
    plan = harness.launch()
    assert [chunk.num_new_tokens for chunk in plan.chunks] == [5]  # the prompt's
    harness.land()
    assert len(sequence.token_ids) == 3 + 1 + 6 + 1 + 1
    harness.run()


def test_a_preempted_sequence_keeps_the_state_before_its_drafts() -> None:
    harness = Harness(hybrid())
    with_drafts(harness)
    sequence = harness.add("a", 4, 12)
    harness.step()
    harness.launch()
    harness.scheduler.running_set.preempt(sequence, 0)
    harness.land()
    assert sequence.state is SequenceState.PREEMPTED
    assert (len(sequence.token_ids), sequence.num_computed_tokens) == (9, 5)
    plan = harness.launch()
    assert plan.admit[0].num_computed_tokens == 5
    harness.land()
    harness.run()


def test_a_fork_of_a_sequence_with_accepted_drafts_computes_them_itself() -> None:
    harness = Harness(hybrid())
    with_drafts(harness)
    parent = harness.add("a", 4, 12)
    harness.step()
    harness.step()
    child = harness.fork(parent, 1)
    assert child.num_common_tokens == 9
    harness.run()


@pytest.mark.parametrize("most", [0, 3, 9])
def test_snapshots_and_hits_are_those_without_drafts(most: int) -> None:
    """Sequences stop every 256 tokens, at the end of the prompt, and at their own end."""
    harness = Harness(hybrid(600), budget=600)
    if most:
        with_drafts(harness, most=most)
    sequence = harness.add("a", 250, 40)
    published: list[int] = []
    publish = harness.memory.snapshots.publish

    def publish_and_note(*given: object) -> None:
        published.append(sequence.num_computed_tokens)
        publish(*given)  # type: ignore[arg-type]

    harness.memory.snapshots.publish = publish_and_note  # type: ignore[method-assign]
    num_steps = harness.run()
    assert published == [248, 256, 250 + 40 - 1]
    again = harness.add("b", [*sequence.token_ids, 7, 7, 7], 2)
    assert harness.memory.match(again).num_tokens == 289
    if most:
        assert num_steps < 30
    harness.run()


def test_an_answer_that_ends_among_drafts_leaves_the_state_before_them() -> None:
    harness = Harness(hybrid())
    with_drafts(harness)
    sequence = harness.add("a", 4, 12)
    harness.step()
    assert drafts_of(harness.launch()) == {0: 3}
    sequence.end_token_ids = frozenset({harness.expected["a"][0][3]})
    harness.land()
    assert sequence.is_finished and len(sequence.token_ids) == 8
    again = harness.add("b", [*sequence.token_ids, 7, 7, 7], 2)
    assert harness.memory.match(again).num_tokens == 5
    harness.expected.pop("a")
    harness.run()


def test_with_overlap_a_row_waits_for_snapshots_too() -> None:
    harness = Harness(hybrid())
    oracle = with_drafts(harness)
    oracle.names = set()
    sequence = harness.add("a", 9, 12)
    assert harness.launch().num_tokens == 8  # up to the last full block
    assert harness.scheduler.schedule(0.0) is None
    harness.land()
    assert sequence.snapshot.num_tokens == 8
    harness.run()


def test_a_speculator_of_a_model_with_states_drafts() -> None:
    oracle = with_drafts(Harness())
    scheduler = Scheduler(SchedulerConfig(4, 64), hybrid(), speculator=oracle)
    assert scheduler.drafting is not None


# ---- costs --------------------------------------------------------------------------------------


def test_a_draft_that_is_computed_twice_is_worth_less() -> None:
    budget = make_pacer(ratio=20.0).open_step(StepDemand(2048, 1, 100, 1))
    chances = tuple(0.97**place for place in range(1, 200))
    (once,), _ = choose_lengths([DraftCandidate(100, chances)], budget)
    (twice,), _ = choose_lengths([DraftCandidate(100, chances, is_replayed=True)], budget)
    assert 0 < twice < once


def test_a_replay_takes_its_tokens_beside_the_row_that_decodes() -> None:
    demand = StepDemand(10, 2, 200, 1)
    budget = StepBudget(10, demand.decode_load)
    assert budget.take_replay(100, 4) == 4 and budget.num_tokens == 7
    assert budget.take_replay(100, 99) == 8 and budget.is_spent
    assert budget.take_replay(100, 3) == 1
    load = budget.load
    assert (load.num_decodes, load.num_replay_tokens, load.num_tokens) == (2, 10, 12)
    assert load.num_chunk_tokens == load.num_drafts == 0


def test_replays_do_not_raise_the_limit_of_a_paced_step() -> None:
    pacer = make_pacer(ratio=3.0)
    plain, replaying = (pacer.open_step(StepDemand(2048, 4, 400, 1)) for _ in range(2))
    replaying.take_replay(100, 40)
    assert replaying.drafts_limit_s() == plain.drafts_limit_s()
    assert 0 < replaying.take_chunk(0, 2000) < plain.take_chunk(0, 2000)


def test_what_replays_take_is_no_saved_time() -> None:
    harness = Harness(hybrid(), budget=200)
    harness.scheduler.pacer = make_pacer(ratio=20.0)
    with_drafts(harness, most=60)
    sequence = harness.add("a", 4, 200)
    harness.step()
    (count,) = drafts_of(harness.step()).values()
    drafting = drafting_of(harness)
    saved_s = drafting.saved_s
    assert saved_s > 0 and sequence.num_tokens - sequence.num_computed_tokens == 1 + count
    drafting._num_to_rest = 2
    assert harness.step().chunks == (Chunk(0, 1 + count),)
    assert 0 < drafting.saved_s < saved_s
    harness.run()
