"""Drafts behind decoding rows: who gets how many, and what is kept of them."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from types import SimpleNamespace

import pytest
from tests.core.harness import Harness, greedy_harness, launch, make_groups, make_memory
from tests.core.scheduling.test_pacing import make_pacer

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.pooling import PoolingKind, PoolingParams
from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepLoad, typical_model
from quire.core.scheduling.draft_lengths import DraftCandidate, choose_lengths, least_tokens
from quire.core.scheduling.drafts import (
    ASKING_S,
    ASKING_SHARE,
    CREDIT_SHARE,
    MOST_CREDIT_S,
    Drafting,
)
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import LEARNS_EVERY_S, LearningPacer, StepBudget, StepDemand
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.scheduling.proposals import NO_PROPOSAL, Proposal
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Chunk, EditKind, StepPlan
from quire.simulation.fakes.fake_runner import Faults, InjectedFailureError
from quire.simulation.workload import read_groups

Guess = Callable[[Sequence], Tokens[int]]


class Oracle:
    """Knows what each sequence will get; `wrong` has the output positions at which it errs."""

    def __init__(self, harness: Harness, wrong: Tokens[int] = (), most: int = 3) -> None:
        self.harness, self.wrong, self.most = harness, set(wrong), most
        #: The sequences for which it has guesses; None for all.
        self.names: set[str] | None = None
        self.asked: list[tuple[str, int]] = []
        self.learned: list[tuple[int, int]] = []
        self.ended: list[str] = []

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        name = next(key for key, (_, each) in self.harness.requests.items() if each is sequence)
        self.asked.append((name, most))
        if self.names is not None and name not in self.names:
            return NO_PROPOSAL
        first = sequence.num_output_tokens
        expected = self.harness.expected[name][0][first : first + min(most, self.most)]
        guess = tuple([token + (first + at in self.wrong) for at, token in enumerate(expected)])
        return Proposal(guess, (1.0,) * len(guess), "oracle")

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        self.learned.append((len(proposal.token_ids), num_accepted))

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence.request_id)


def with_drafts(harness: Harness, wrong: Tokens[int] = (), most: int = 3) -> Oracle:
    """Give the harness a proposer of at most `most` drafts."""
    scheduler, oracle = harness.scheduler, Oracle(harness, wrong, most)
    slots = scheduler._slots
    scheduler.drafting = Drafting(oracle, harness.memory, scheduler.running_set, slots, most)
    return oracle


def drafting_of(harness: Harness) -> Drafting:
    assert harness.scheduler.drafting is not None
    return harness.scheduler.drafting


def drafts_of(plan: StepPlan) -> dict[int, int]:
    """Row -> number of its drafts."""
    return {chunk.row: len(chunk.draft_token_ids) for chunk in plan.chunks if chunk[2]}


# ---- one row ------------------------------------------------------------------------------------


def test_all_drafts_are_accepted_and_their_tokens_counted_at_once() -> None:
    harness = Harness()
    oracle = with_drafts(harness)
    sequence = harness.add("a", 6, 12)
    harness.step()
    assert len(sequence.token_ids) == 7
    plan = harness.launch()
    expected = harness.expected["a"][0]
    assert plan.chunks == (Chunk(0, 4, expected[1:4]),) and plan.num_tokens == 4
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (8, 7)
    assert sequence.draft_token_ids == expected[1:4]
    harness.land()
    assert (len(sequence.token_ids), sequence.num_computed_tokens) == (11, 10)
    assert (sequence.num_confirmed_tokens, sequence.num_published_blocks) == (10, 2)
    assert sequence.draft_token_ids == () and sequence.num_pending_tokens == 0
    harness.run()
    drafting = drafting_of(harness)
    assert drafting.num_drafts == drafting.num_accepted_drafts == 3 + 3 + 2
    assert drafting.as_dict()["by_proposer"]["oracle"]["verified"] == [3, 3, 2]
    assert oracle.learned == [(3, 3), (3, 3), (2, 2)] and oracle.ended == ["a"]
    assert harness.scheduler.stats.num_steps == 4


@pytest.mark.parametrize(("wrong", "num_sampled"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_drafts_behind_a_wrong_one_are_rejected(wrong: int, num_sampled: int) -> None:
    harness = Harness()
    with_drafts(harness, wrong=[wrong])
    sequence = harness.add("a", 6, 12)
    harness.step()
    harness.step()
    assert len(sequence.token_ids) == 7 + num_sampled
    assert sequence.num_computed_tokens == sequence.num_confirmed_tokens == 6 + num_sampled
    harness.run()


def test_only_blocks_of_confirmed_tokens_are_published() -> None:
    """Drafts fill the block that ends after token 8, but the first of them is wrong."""
    harness = Harness()
    with_drafts(harness, wrong=[2])
    sequence = harness.add("a", 5, 12)
    harness.step()
    harness.launch()
    assert sequence.num_published_blocks == 1
    harness.land()
    assert (sequence.num_confirmed_tokens, sequence.num_published_blocks) == (7, 1)
    assert len(harness.memory.cache) == 1
    harness.run()


def test_a_sequence_may_end_among_accepted_drafts_and_nothing_behind_is_kept() -> None:
    harness = Harness()
    with_drafts(harness)
    sequence = harness.add("a", 5, 12)
    harness.step()
    assert drafts_of(harness.launch()) == {0: 3}
    found = harness.expected["a"][0]
    sequence.end_token_ids = frozenset({found[2]})  # else the drafts would be cut before it
    published: list[int] = []
    publish = harness.memory.publish

    def publish_and_note(sequence: Sequence, num_confirmed_tokens: int) -> None:
        published.append(num_confirmed_tokens)
        publish(sequence, num_confirmed_tokens)

    harness.memory.publish = publish_and_note  # type: ignore[method-assign]
    (output,) = harness.land()
    assert output.token_ids == found[1:3] and output.finish_reason is FinishReason.STOP
    assert len(sequence.token_ids) == 8 and published == []
    index = harness.memory.prefixes
    again = harness.add("b", [*sequence.token_ids, 7, 7, 7], 2)
    match = index.match(again)
    assert match.num_tokens == 7  # the block of 4, and 3 of the partly filled one
    harness.expected.pop("a")
    harness.run()


def test_tokens_before_one_that_the_grammar_refuses_are_returned_with_the_error() -> None:
    harness = Harness()
    with_drafts(harness)
    sequence = harness.add("a", 5, 12)
    harness.step()
    taken: list[int] = []

    def accept_token(token_id: int) -> bool:
        taken.append(token_id)
        constraint.error = "it is not allowed" if len(taken) == 3 else None
        return len(taken) == 3

    constraint = SimpleNamespace(
        error=None, ends_with_text=False, is_ready=True, accept_token=accept_token
    )
    constraint.allowed_prefix = lambda token_ids: 2
    sequence.constraint = constraint
    harness.scheduler.running_set.num_constrained += 1
    assert drafts_of(harness.launch()) == {0: 2}
    (output,) = harness.land()
    assert output.token_ids == harness.expected["a"][0][1:3]
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "it is not allowed")
    harness.run()


# ---- how many -----------------------------------------------------------------------------------


def test_no_draft_follows_the_last_token_but_one() -> None:
    harness = Harness()
    oracle = with_drafts(harness, most=9)
    harness.add("a", 5, 6)
    harness.step()
    assert drafts_of(harness.step()) == {0: 4}  # and so 5 tokens, the last of 6
    assert oracle.asked == [("a", 4)]
    assert harness.run() == 0


def test_drafts_get_what_prompts_and_decoding_rows_leave_of_the_budget() -> None:
    harness = Harness(make_memory(40), budget=8)
    with_drafts(harness, most=9)
    harness.add("a", 3, 20)
    harness.add("b", 3, 20)
    harness.step()
    assert drafts_of(harness.launch()) == {0: 6}
    harness.land()
    harness.add("c", 5, 20)
    assert drafts_of(harness.launch()) == {0: 1}
    harness.land()
    harness.add("d", 50, 20)
    assert drafts_of(harness.launch()) == {}
    harness.land()
    harness.run()


def test_drafts_take_free_blocks_alone_and_leave_each_row_one_to_grow() -> None:
    """Of 8 blocks of 4, two sequences of 7 tokens hold 2 each; two more are left for their
    growth."""
    harness = greedy_harness(make_memory(8))
    with_drafts(harness, most=20)
    for name in ("a", "b"):
        harness.add(name, 6, 20)
    harness.step()
    plan = harness.launch()
    assert drafts_of(plan) == {0: 1 + 2 * 4, 1: 1}
    assert [edit.kind for edit in plan.table_edits] == [EditKind.APPEND]
    assert harness.memory.pool.num_free == 2
    harness.land()
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    harness.run()


def test_drafts_take_no_pinned_block() -> None:
    harness = greedy_harness(make_memory(8))
    with_drafts(harness, most=20)
    first = harness.add("first", 16, 1)
    harness.run()
    pinned = harness.memory.prefixes.pin(first.token_ids[:16], first.chain_root, 0, None)
    assert pinned == 16 and harness.memory.pool.num_free_pinned == 4
    harness.add("a", 6, 20)
    harness.step()
    assert drafts_of(harness.launch()) == {0: 1 + 4}  # 2 held, 4 pinned, 1 to grow
    harness.land()
    assert harness.memory.pool.num_free_pinned == 4


def test_drafts_fit_into_the_time_of_a_paced_step() -> None:
    """A step of 4 decoding rows may take 2.5 times as long."""
    pacer = make_pacer(ratio=2.5)
    budget = pacer.open_step(StepDemand(2048, 4, 400, 1))
    alone_s = pacer.model.predict_s(budget.load)
    assert least_tokens(budget) < 1
    (most,) = choose_lengths([DraftCandidate(100, (1.0,) * 1000)], budget).lengths
    assert 0 < most < 1000
    ratio = 2.5 / pacer.margin
    assert pacer.model.predict_s(budget.load.with_drafts(100, most)) <= ratio * alone_s
    assert pacer.model.predict_s(budget.load.with_drafts(100, most + 1)) > ratio * alone_s
    budget.take_drafts(100, most)
    assert choose_lengths([DraftCandidate(100, (1.0,) * 10)], budget).lengths == [0]
    assert budget.load == StepDemand(0, 4, 400).decode_load.with_drafts(100, most)
    assert budget.load.num_decodes == 4 + most and budget.num_tokens == 2048 - most


def test_drafts_are_cut_before_a_token_that_ends_the_sequence() -> None:
    harness = Harness()
    with_drafts(harness)
    sequence = harness.add("a", 5, 12)
    harness.step()
    sequence.end_token_ids = frozenset({harness.expected["a"][0][2]})
    assert drafts_of(harness.launch()) == {0: 1}
    (output,) = harness.land()
    assert output.finish_reason is FinishReason.STOP and len(output.token_ids) == 2


# ---- who ----------------------------------------------------------------------------------------


def test_beams_pooling_and_prompts_have_no_drafts() -> None:
    harness = Harness()
    oracle = with_drafts(harness)
    harness.add("a", 5, params=DecodingParams(6, beam_width=2))
    pooling = PoolingParams(PoolingKind.LAST)
    harness.add("b", 1, params=DecodingParams(1, pooling=pooling))
    for _ in range(3):
        assert drafts_of(harness.step()) == {}
    assert oracle.asked == []


def test_a_parent_has_none_while_forks_wait_for_it() -> None:
    harness = Harness(max_num_seqs=1)
    with_drafts(harness)
    parent = harness.add("a", 5, 12)
    harness.step()
    harness.fork(parent, 1)
    assert drafts_of(harness.step()) == {}
    parent.forks[0].stop_waiting_for_fork()
    assert drafts_of(harness.step()) == {0: 3}
    harness.run()


def test_a_scheduler_drafts_if_it_has_a_speculator() -> None:
    plain = Scheduler(SchedulerConfig(4, 64), make_memory(), speculator=Oracle(Harness()))
    assert plain.drafting is not None
    assert Scheduler(SchedulerConfig(4, 64), make_memory()).drafting is None


def test_a_suspect_runs_alone_and_without_drafts() -> None:
    harness = Harness(faults=Faults(execute_fails_at=frozenset({2})))
    oracle = with_drafts(harness)
    sequences = [harness.add(name, 5, 12) for name in ("a", "b")]
    for _ in range(3):
        harness.step()
    assert all(not sequence.draft_token_ids for sequence in sequences)
    oracle.asked.clear()
    for _ in sequences:
        assert drafts_of(harness.step()) == {}
    assert oracle.asked == []
    assert drafts_of(harness.step()) != {}
    harness.run()


# ---- while the step runs ------------------------------------------------------------------------


def test_a_row_waits_for_its_drafts_while_others_go_on() -> None:
    harness = Harness()
    oracle = with_drafts(harness)
    harness.add("a", 5, 20)
    harness.add("b", 5, 20)
    oracle.names = {"a"}
    harness.step()
    assert drafts_of(harness.launch()) == {0: 3}
    plan = harness.launch()
    assert plan.chunks == (Chunk(0, 0),) and plan.num_tokens == 1
    harness.land()
    assert drafts_of(harness.launch()) == {0: 3}
    harness.land()
    harness.run()


def test_a_row_waits_for_its_last_token_if_drafts_would_follow() -> None:
    harness = Harness()
    oracle = with_drafts(harness)
    harness.add("a", 5, 20)
    harness.launch()
    harness.launch()
    assert oracle.asked == []  # it has no output yet
    harness.land()
    assert harness.scheduler.schedule(0.0) is None
    assert oracle.asked == [("a", 2)]
    harness.land()
    assert drafts_of(harness.launch()) == {0: 3}
    harness.land()
    harness.run()


def test_a_row_whose_last_token_is_unknown_goes_on_without_a_guess() -> None:
    """A proposer that guesses less than the next token but one has no drafts for it."""
    harness = Harness()
    oracle = with_drafts(harness, most=1)
    sequence = harness.add("a", 5, 20)
    harness.launch()
    plan = harness.launch()
    assert (plan.chunks, sequence.num_pending_tokens) == ((), 2)
    assert oracle.asked == [] or oracle.asked == [("a", 2)]
    harness.land()
    harness.land()
    harness.run()


def test_a_preempted_sequence_keeps_its_tokens_and_not_its_drafts() -> None:
    harness = Harness()
    with_drafts(harness)
    sequence = harness.add("a", 6, 12)
    harness.step()
    harness.launch()
    harness.scheduler.running_set.preempt(sequence, 0)
    assert sequence.state is SequenceState.PREEMPTED
    harness.check()
    harness.land()
    assert len(sequence.token_ids) == 11 and sequence.num_computed_tokens == 7
    assert sequence.draft_token_ids == ()
    plan = harness.launch()
    assert plan.admit[0].num_computed_tokens == 7 and len(plan.admit[0].token_ids) == 11
    harness.land()
    harness.run()


def test_an_aborted_sequence_has_blocks_until_its_step_has_ended() -> None:
    harness = Harness()
    with_drafts(harness, most=9)
    sequence = harness.add("a", 6, 20)
    harness.step()
    harness.launch()
    harness.scheduler.abort(sequence)
    assert harness.memory.pool.num_held == 4
    harness.check()
    assert harness.land() == []
    assert harness.memory.pool.num_held == 0
    harness.run()


def test_a_failed_step_drops_the_drafts() -> None:
    harness = Harness(faults=Faults(sample_fails_at=frozenset({1})))
    with_drafts(harness)
    sequence = harness.add("a", 6, 12)
    harness.step()
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None and drafts_of(plan) == {0: 3}
    launch(harness.runner, plan)
    with pytest.raises(InjectedFailureError):
        harness.runner.result()
    harness.recover()
    assert sequence.draft_token_ids == () and len(sequence.token_ids) == 7
    harness.run()
    assert drafting_of(harness).num_drafts == drafting_of(harness).num_accepted_drafts


def test_blocks_of_rejected_drafts_are_taken_before_any_sequence_is_preempted() -> None:
    """While the drafts are verified, nothing takes their blocks."""
    memory = make_memory(12)
    harness = greedy_harness(memory, policy=PriorityPolicy())
    oracle = with_drafts(harness, most=16, wrong=range(1, 100))
    sequence = harness.add("a", 6, 20, priority=1)
    harness.step()
    harness.launch()
    held = len(sequence.block_tables[0])
    assert held == 2 + 4
    harness.scheduler.running_set.reclaim(12, sequence, from_running=False)
    assert len(sequence.block_tables[0]) == held
    harness.land()
    oracle.most = 0
    harness.add("b", 35, 4, priority=0)
    harness.step()
    assert len(sequence.block_tables[0]) == 2
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    harness.run()


def test_windows_pass_confirmed_tokens_alone() -> None:
    """Rejected drafts filled blocks ahead; the row still reads those behind."""
    config = KVCacheConfig(read_groups("full,window:5"), 60, 2, secret=b"s")
    harness = Harness(KVCacheManager(config))
    with_drafts(harness, most=9, wrong=[2, 5, 6])
    sequence = harness.add("a", 9, 30)
    harness.step()
    harness.launch()
    holes = sequence.block_tables[1].count(-1)
    harness.land()
    harness.scheduler.memory.forget_passed(sequence)
    assert sequence.num_confirmed_tokens == 11
    assert sequence.block_tables[1].count(-1) == (10 - 5 + 1) // 2 >= holes
    harness.run()


@pytest.mark.parametrize("seed", range(4))
def test_many_sequences_get_the_same_tokens_with_drafts(seed: int) -> None:
    memory = KVCacheManager(KVCacheConfig(make_groups(2), 40, 4, secret=b"s"))
    harness = greedy_harness(memory, max_num_seqs=6, budget=24)
    with_drafts(harness, most=5, wrong=range(seed, 40, 3 + seed))
    for index in range(12):
        harness.add(f"r{index}", 3 + 2 * index % 7, 5 + index)
    harness.run()
    drafting = drafting_of(harness)
    assert 0 < drafting.num_accepted_drafts < drafting.num_drafts


@pytest.mark.parametrize(("num_rows", "step_s"), [(1, 1.03e-3), (1, 0.1), (4, 1.03e-3), (4, 0.1)])
def test_asking_in_vain_takes_a_small_share_of_the_time(num_rows: int, step_s: float) -> None:
    memory = KVCacheManager(KVCacheConfig(make_groups(1), 260, 4, secret=b"s"))
    harness = greedy_harness(memory, max_num_seqs=6, budget=64)
    oracle = with_drafts(harness)
    oracle.names = set()
    harness.scheduler.pacer = pacer = LearningPacer()
    pacer.model = typical_model(StepLoad(num_rows), step_s)
    for index in range(num_rows):
        harness.add(f"r{index}", 5 + index, 240)
    asking_s = (1 + num_rows) * ASKING_S
    while len(oracle.asked) < num_rows * (1 + MOST_CREDIT_S // asking_s):
        harness.step()
    num_rests = int(asking_s / (ASKING_SHARE * step_s))
    assert bool(num_rests) == (step_s < 0.1)
    for index in range(1, 80):
        before = len(oracle.asked)
        harness.step()
        is_asked = index % (1 + num_rests) == 0
        assert len(oracle.asked) - before == num_rows * is_asked
        assert drafting_of(harness).is_idle  # no draft was found
    oracle.names = None
    harness.run()
    assert drafting_of(harness).num_accepted_drafts > 0


def test_saved_time_is_a_credit_for_asking_in_vain() -> None:
    memory = KVCacheManager(KVCacheConfig(make_groups(1), 260, 4, secret=b"s"))
    harness = greedy_harness(memory, budget=64)
    oracle = with_drafts(harness)
    harness.scheduler.pacer = pacer = LearningPacer()
    pacer.model = typical_model(StepLoad(1), 1.03e-3)
    harness.add("a", 5, 240)
    # First, spend the credit that an engine begins with.
    oracle.names = set()
    drafting = drafting_of(harness)
    num_before = 1
    while len(oracle.asked) != num_before:
        num_before = len(oracle.asked)
        harness.step()
        harness.step()
    # Then save time by drafts, which the first step that asks begins.
    oracle.names = None
    while drafting.saved_s < 6 * 2 * ASKING_S / CREDIT_SHARE:
        harness.step()
    num_tries = int(CREDIT_SHARE * drafting.saved_s / (2 * ASKING_S))
    assert 6 <= num_tries < MOST_CREDIT_S / (2 * ASKING_S)
    # Rows are asked in each step until the credit is spent.
    oracle.names = set()
    num_before = len(oracle.asked)
    for _ in range(num_tries + 5):
        harness.step()
    assert len(oracle.asked) - num_before == num_tries + 1


def test_guesses_that_bring_less_than_the_first_draft_costs_are_not_weighed() -> None:
    """`least_tokens` agrees with `choose_lengths`, which then need not be called."""
    rng = random.Random(5)
    model = typical_model(StepLoad(1), 0.001)
    num_hopeless = num_good = 0
    for _ in range(300):
        num_rows = rng.randint(1, 6)
        load = StepLoad(num_rows, 100 * num_rows)
        if rng.random() < 0.5:
            load = load.with_chunk(0, rng.randint(1, 30))
        budget = StepBudget(64, load, model)
        chances = [rng.random() ** 4 for _ in range(num_rows)]
        candidates = [
            DraftCandidate(100, tuple(chance**place for place in range(1, 5))) for chance in chances
        ]
        lengths = choose_lengths(candidates, budget).lengths
        if sum([sum(candidate.survival) for candidate in candidates]) <= least_tokens(budget):
            assert not any(lengths)
            num_hopeless += 1
        num_good += any(lengths)
    assert num_hopeless > 20 and num_good > 20


def test_plain_steps_are_learned_from_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pacer = LearningPacer()
    observed: list[StepLoad] = []
    learned_s: list[float] = []

    def observe(load: StepLoad, seconds: float) -> None:
        observed.append(load)
        learned_s.append(seconds)

    def run(step_id: int, step_s: float, num_drafts: int = 0) -> None:
        budget = pacer.open_step(StepDemand(64, num_decodes=1))
        if num_drafts:
            budget.take_drafts(10, num_drafts)
        pacer.launch(step_id)
        pacer.observe(step_id, step_s)

    run(0, 0.001)
    assert pacer.model is not None
    monkeypatch.setattr(pacer.model, "observe", observe)
    for step_id in range(1, 41):
        run(step_id, LEARNS_EVERY_S / 10)
    assert len(observed) in (3, 4)  # times are sums of rounded numbers
    run(41, LEARNS_EVERY_S / 10, num_drafts=2)
    assert observed[-1].num_drafts == 2
    observed.clear()
    for step_id in range(42, 47):
        run(step_id, 2 * LEARNS_EVERY_S)
    assert len(observed) >= 4
    # Long steps are no likelier to be learned from than others.
    learned_s.clear()
    for step_id in range(47, 147):
        run(step_id, LEARNS_EVERY_S * (2 if step_id % 10 == 0 else 0.01))
    assert len(learned_s) == 11 and set(learned_s) == {LEARNS_EVERY_S * 0.01}
