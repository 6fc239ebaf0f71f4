"""After a failed step the sequence at fault is found; all others get their tokens."""

import pytest
from tests.core.harness import Harness, launch, make_memory

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.fault_isolation import FaultIsolation
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.sequence import Sequence
from quire.simulation.fakes.fake_runner import Faults, InjectedFailureError

POISON = 5000


def make(name: str, rank: int) -> Sequence:
    sequence = Sequence(name, [1], DecodingParams(4))
    sequence.rank = (rank,)
    return sequence


def poisoned(length: int = 5) -> list[int]:
    return [*range(1, length), POISON]


def errors(harness: Harness) -> set[str]:
    ended = harness.ended.items()
    return {name for name, output in ended if output.finish_reason is FinishReason.ERROR}


# ---- the list by itself -------------------------------------------------------------------------


def test_all_in_a_failed_step_are_suspected_in_the_order_of_rank() -> None:
    suspects, first, second = FaultIsolation(), make("one", 1), make("two", 2)
    assert suspects.next_suspect() is None
    assert suspects.blame({second, first}) is None
    assert suspects.next_suspect() is first
    suspects.clear([first])
    assert suspects.next_suspect() is second
    suspects.clear([second])
    assert suspects.next_suspect() is None


def test_only_a_suspect_that_was_alone_is_blamed() -> None:
    suspects, first, second = FaultIsolation(), make("one", 1), make("two", 2)
    suspects.blame({first})
    assert suspects.blame({first, second}) is None
    assert suspects.blame({second}) is second


def test_the_finished_are_not_suspected_and_not_blamed() -> None:
    suspects, first, second = FaultIsolation(), make("one", 1), make("two", 2)
    suspects.blame({first, second})
    first.move_to(type(first.state).FINISHED)
    assert suspects.next_suspect() is second
    assert suspects.blame({first}) is None
    assert suspects.next_suspect() is second


# ---- in the scheduler ---------------------------------------------------------------------------


def test_one_failed_step_ends_no_request() -> None:
    harness = Harness(faults=Faults(execute_fails_at=frozenset({2})))
    for name in "abc":
        harness.add(name, 5, 6)
    harness.run()
    assert errors(harness) == set()
    assert harness.scheduler.stats.num_failed_steps == 1


def test_a_step_may_fail_in_sample_too() -> None:
    harness = Harness(faults=Faults(sample_fails_at=frozenset({0, 3})))
    for name in "abc":
        harness.add(name, 5, 6)
    harness.run()
    assert errors(harness) == {"c"}, "the one that was tried alone in step 3"


def test_a_poison_request_ends_alone() -> None:
    harness = Harness(faults=Faults(poison_token_id=POISON))
    for name in "abc":
        harness.add(name, 5, 6)
    harness.step()
    harness.add("poison", poisoned(), 6)
    harness.add("d", 5, 6)
    harness.run()
    assert errors(harness) == {"poison"}
    assert "execute of step" in (harness.ended["poison"].error or "")
    assert harness.received["poison"] == []


@pytest.mark.parametrize("policy_name", ["fcfs", "priority"])
def test_a_second_poison_during_a_trial_causes_no_wrong_blame(policy_name: str) -> None:
    harness = Harness(faults=Faults(poison_token_id=POISON), policy=PriorityPolicy())
    first = 9 if policy_name == "priority" else 0
    for name in "abc":
        harness.add(name, 5, 6, priority=first)
    harness.add("poison", poisoned(), 6, priority=first)
    harness.step()
    harness.add("poison too", poisoned(7), 6, priority=0)
    harness.run()
    assert errors(harness) == {"poison", "poison too"}


@pytest.mark.parametrize("caching", [True, False])
def test_a_poison_that_strikes_in_its_second_chunk_does_not_go_round_for_ever(
    caching: bool,
) -> None:
    """Its first chunk succeeds alone, which proves nothing: only a sampled token clears."""
    harness = Harness(make_memory(16, caching=caching), budget=8)
    harness.add("a", 5, 6)
    harness.add("poison", 14, 6)
    for _ in range(60):
        if not harness.scheduler.has_unfinished:
            break
        plan = harness.scheduler.schedule(0.0)
        assert plan is not None
        launch(harness.runner, plan)
        poison = harness.requests["poison"][1]
        if poison.state.value == "running" and poison.num_computed_tokens > 10:
            harness.recover("it struck")
        else:
            harness.land()
    assert errors(harness) == {"poison"}
    harness.check_answers()
    assert len(harness.received["a"]) == 6


def test_a_suspect_runs_alone_and_the_others_pause() -> None:
    harness = Harness(faults=Faults(execute_fails_at=frozenset({1})))
    for name in "abc":
        harness.add(name, 5, 6)
    harness.step()
    harness.step()
    plans = [harness.step() for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [2, 2, 2]  # block 0 comes from the cache
    assert [len(plan.admit) for plan in plans] == [1, 1, 1]
    assert [sum(chunk.num_new_tokens == 0 for chunk in plan.chunks) for plan in plans] == [0, 1, 2]
    assert harness.step().num_tokens == 3
    harness.run()


def test_a_trial_waits_for_nothing_in_flight_and_nothing_joins_it() -> None:
    harness = Harness()
    harness.add("a", 5, 6)
    harness.launch()
    harness.recover()
    harness.add("b", 5, 6)
    harness.launch()
    assert harness.scheduler.schedule(0.0) is None
    harness.land()
    harness.run()


def test_a_trial_takes_the_room_it_needs() -> None:
    harness = Harness(make_memory(num_blocks=6), max_num_seqs=2, budget=16)
    harness.add("a", 10, 8)
    harness.add("b", 9, 8)
    harness.step()
    harness.launch()
    harness.recover()
    harness.memory.prefixes.clear()
    harness.run()
    assert errors(harness) == set()


def test_an_aborted_suspect_in_flight_causes_no_blame() -> None:
    harness = Harness(faults=Faults(poison_token_id=POISON))
    poison = harness.add("poison", poisoned(), 6)
    harness.add("a", 5, 6)
    harness.step()
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(InjectedFailureError):
        launch(harness.runner, plan)
    harness.scheduler.abort(poison)
    assert harness.recover() == []
    harness.run()
    assert errors(harness) == set()
    assert len(harness.received["a"]) == 6


def test_two_steps_in_flight_are_both_dropped_and_computed_again() -> None:
    harness = Harness()
    a = harness.add("a", 5, 6)
    harness.launch()
    harness.launch()
    assert harness.recover() == []
    assert (a.num_pending_tokens, a.num_computed_tokens, a.row) == (0, 0, None)
    assert harness.memory.pool.num_held == 0
    harness.run()
    assert len(harness.received["a"]) == 6


def test_recovery_with_nothing_in_flight_only_starts_the_rows_again() -> None:
    harness = Harness()
    harness.add("a", 5, 6)
    harness.step()
    assert harness.recover() == []
    harness.run()
    assert errors(harness) == set()


def test_many_poisons_among_many() -> None:
    harness = Harness(make_memory(num_blocks=12), faults=Faults(poison_token_id=POISON), budget=8)
    for index in range(20):
        harness.add(f"r{index}", poisoned(2 + index % 7) if index % 5 == 2 else 2 + index % 7, 5)
    harness.run()
    assert errors(harness) == {"r2", "r7", "r12", "r17"}
