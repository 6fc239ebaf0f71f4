"""Branches of one request, and forks of running sequences: what they share, copy and get."""

import pytest
from tests.core.harness import Harness, greedy_harness, make_memory
from tests.core.scheduling.test_in_flight import run_ahead

from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import StepPlan
from quire.errors import RequestNeverFitsError

RUNNING, WAITING = SequenceState.RUNNING, SequenceState.WAITING


def num_shared(branches: list[Sequence], index: int) -> int:
    """How many of them have the first one's block at this place."""
    first = branches[0].block_tables[0][index]
    return sum(branch.block_tables[0][index] == first for branch in branches)


# ---- n > 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_branches_share_the_prompt_and_copy_its_last_block_once_each(
    n: int, num_prompt_tokens: int, num_groups: int
) -> None:
    harness = Harness(make_memory(60, 4, num_groups), max_num_seqs=6)
    branches = harness.add_branches("a", num_prompt_tokens, 10, n=n)
    plan = harness.step()
    assert [fork.joins_step for fork in plan.forks] == [True] * (n - 1)
    assert plan.num_tokens == num_prompt_tokens, "the prompt is computed once"
    assert (plan.num_rows, len(plan.admit), plan.copies) == (n, 1, ())
    num_blocks = -(-num_prompt_tokens // 4)
    assert harness.memory.pool.num_held == num_blocks * num_groups
    assert all(num_shared(branches, index) == n for index in range(num_blocks))
    plan = harness.step()
    is_partial = num_prompt_tokens % 4 > 0
    assert len(plan.copies) == (n - 1) * is_partial * num_groups
    copies = [plan.copies]
    while harness.scheduler.has_unfinished:
        copies.append(harness.step().copies)
        full = num_prompt_tokens // 4
        live = [branch for branch in branches if branch.state is RUNNING]
        assert all(num_shared(live, index) == len(live) for index in range(full if live else 0))
    assert not any(copies[1:]), "after that each writes what is its own"
    harness.check_answers()


def test_each_branch_gets_its_own_tokens_and_hits() -> None:
    harness = Harness(make_memory(40))
    harness.add("first", [*range(1, 12)], 1)
    harness.run()
    branches = harness.add_branches("a", [*range(1, 11), 50], 6, n=4)
    harness.run()
    outputs = [harness.received[key] for key in ("a", "a/1", "a/2", "a/3")]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    assert [branch.num_cached_tokens for branch in branches] == [10] * 4


@pytest.mark.parametrize("run", [Harness.run, run_ahead])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_branches_that_find_no_row_come_later_from_the_blocks_of_the_first(
    max_num_seqs: int, caching: bool, run: object
) -> None:
    harness = Harness(make_memory(40, caching=caching), max_num_seqs=max_num_seqs)
    branches = harness.add_branches("a", 9, 6, n=5)
    plan = harness.step()
    assert sum(branch.state is RUNNING for branch in branches) == min(5, max_num_seqs)
    assert len(plan.forks) == min(5, max_num_seqs) - 1
    assert callable(run)
    run(harness)


def test_a_late_branch_copies_the_partly_filled_block_of_the_prompt() -> None:
    harness = Harness(make_memory(40, caching=False), max_num_seqs=2)
    harness.add("other", 3, 2)
    branches = harness.add_branches("a", 10, 8, n=2)
    plans: list[StepPlan] = []
    while branches[1].state is WAITING:
        plans.append(harness.step())
    assert len(plans) == 3 and not plans[-1].forks
    (admission,) = plans[-1].admit
    assert admission.num_computed_tokens == 9, "one token is left to compute"
    (copy,) = plans[-1].copies
    assert copy.source == branches[0].block_tables[0][2]
    assert copy.target == branches[1].block_tables[0][2]
    harness.run()


def test_a_fork_admitted_in_the_step_that_fills_its_parents_copy_copies_the_original() -> None:
    """Nothing is a source and a target in one plan: copies are made at once."""
    harness = Harness(make_memory(40, block_size=8), max_num_seqs=4, num_lookahead_blocks=1)
    harness.add("first", list(range(1, 16)), 1)
    harness.run()
    branches = harness.add_branches("a", [*range(1, 15), 90], 6, n=3)
    plan = harness.step()
    assert [branch.state for branch in branches] == [RUNNING] * 3
    targets = {copy.target for copy in plan.copies}
    assert targets and not targets & {copy.source for copy in plan.copies}
    harness.run()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("budget", [4, 64])
def test_aborting_any_branch_leaves_the_others_running(
    budget: int, num_steps: int, which: int
) -> None:
    harness = Harness(make_memory(40), max_num_seqs=4, budget=budget)
    branches = harness.add_branches("a", 13, 6, n=4)
    for _ in range(num_steps):
        harness.step()
    harness.scheduler.abort(branches[which])
    harness.check()
    harness.run()
    assert sum(len(tokens) == 6 for tokens in harness.received.values()) == 3


def test_the_heir_of_an_ended_first_branch_computes_the_prompt_for_the_others() -> None:
    harness = Harness(make_memory(40, caching=False), budget=8)
    branches = harness.add_branches("a", 20, 4, n=3)
    harness.step()
    harness.scheduler.abort(branches[0])
    assert (branches[1].parent, branches[2].parent) == (None, branches[1])
    num_tokens = sum(harness.step().num_tokens for _ in range(3))
    assert num_tokens == 20, "once for both"
    harness.run()


@pytest.mark.parametrize("num_prompt_logprobs", [0, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
@pytest.mark.parametrize(("num_blocks", "budget"), [(40, 64), (40, 5), (9, 64), (9, 5)])
def test_all_branches_get_the_log_probabilities_of_the_prompt(
    num_blocks: int, budget: int, max_num_seqs: int, num_prompt_logprobs: int
) -> None:
    harness = greedy_harness(
        make_memory(num_blocks), max_num_seqs=max_num_seqs, budget=budget, policy=PriorityPolicy()
    )
    params = DecodingParams(9, seed=3, prompt_logprobs=num_prompt_logprobs)
    harness.add_branches("a", 11, n=3, params=params, priority=5)
    harness.add_branches("b", 13, n=2, params=params, priority=5)
    outputs = []
    for index in range(2000):
        if not harness.scheduler.has_unfinished:
            break
        if index in (1, 4):
            harness.add(f"high{index}", 17, 3, priority=0)
        harness.launch()
        outputs += harness.land()
    harness.check_answers()
    given = [output for output in outputs if output.prompt_logprobs is not None]
    assert sorted((output.request_id, output.branch_index) for output in given) == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
        ("b", 1),
    ]
    for output in given:
        request, _ = harness.requests[output.request_id]
        assert output.prompt_logprobs == harness.model.expected_output(request).prompt_logprobs


# ---- forks of running sequences -----------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_fork_goes_on_from_its_parents_tokens_and_blocks(num_steps: int, num_groups: int) -> None:
    harness = Harness(make_memory(60, 4, num_groups, caching=False))
    parent = harness.add("a", 6, 12)
    for _ in range(num_steps):
        harness.step()
    child = harness.fork(parent, 1)
    assert child.token_ids == parent.token_ids and child.token_ids is not parent.token_ids
    plan = harness.step()
    assert child.state is RUNNING
    known = len(child.token_ids) - len(child.token_ids[6 + num_steps :])
    joined = [fork for fork in plan.forks if fork.joins_step]
    if joined:
        assert plan.num_tokens == 1
    else:
        (admission,) = plan.admit
        assert admission.num_computed_tokens == known - 1
        assert len(plan.copies) == ((known - 1) % 4 > 0) * num_groups
    full = (known - 1) // 4
    assert child.block_tables[0][:full] == parent.block_tables[0][:full]
    harness.run()
    assert len(harness.received["a/1"]) == 12 - num_steps


def test_forks_of_forks_and_of_sequences_in_every_state() -> None:
    harness = greedy_harness(make_memory(9), max_num_seqs=2, num_lookahead_blocks=2)
    first, second = harness.add("a", 7, 14), harness.add("b", 9, 12)
    waiting = harness.add("c", 5, 6)
    harness.fork(waiting, 1)
    harness.step()
    child = harness.fork(first, 1)
    harness.fork(child, 2)
    harness.fork(second, 1)
    for _ in range(6):
        harness.step()
    for index, parent in enumerate([first, second, child]):
        if not parent.is_finished:
            harness.fork(parent, 7 + index)
    harness.run()


def test_a_fork_has_its_own_parameters() -> None:
    harness = Harness()
    parent = harness.add("a", 6, 12)
    for _ in range(3):
        harness.step()
    child = harness.fork(parent, 1, DecodingParams(5, seed=9, prompt_logprobs=1))
    assert child.params.prompt_logprobs is None, "they are not given again"
    harness.run()
    assert len(child.token_ids) == 6 + 5, "its limit counts from the prompt"


def test_tokens_after_the_fork_are_not_in_common_whoever_is_parent_then() -> None:
    """The heir has fewer tokens in common with the others than their parent had."""
    harness = Harness(make_memory(60, caching=False), max_num_seqs=1)
    parent = harness.add("a", 6, 20)
    harness.step()
    early = harness.fork(parent, 1)
    for _ in range(5):
        harness.step()
    late = harness.fork(parent, 2)
    harness.scheduler.abort(parent)
    assert late.parent is early
    harness.run()


def test_a_fork_may_not_be_for_ever_too_large() -> None:
    harness = Harness(make_memory(6))
    parent = harness.add("a", 6, 12)
    harness.step()
    with pytest.raises(RequestNeverFitsError, match="may grow to 106 tokens"):
        harness.fork(parent, 1, DecodingParams(100))
    assert not parent.forks
    harness.run()


@pytest.mark.parametrize("seed_step", [1, 2, 3, 5])
def test_forks_and_branches_survive_failed_steps(seed_step: int) -> None:
    harness = greedy_harness(make_memory(20), max_num_seqs=6)
    branches = harness.add_branches("a", 7, 9, n=3)
    parent = harness.add("b", 10, 9)
    for index in range(7):
        harness.launch()
        if index == 2:
            harness.fork(parent, 5)
        if index % seed_step == 0:
            if harness.scheduler.num_steps_in_flight == 1 and seed_step > 1:
                harness.launch()
            harness.runner.reset()
            harness.scheduler.recover(None)
            harness.check()
        else:
            while harness.scheduler.num_steps_in_flight:
                harness.land()
        if index == 3:
            harness.fork(branches[1], 6)
    harness.run()
