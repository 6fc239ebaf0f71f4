"""The waiting queue: order, removal in the middle of a walk, many waiting, bounded work."""

import random
from collections.abc import Iterator

import pytest

from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import Bucket, FcfsPolicy, Policy, Rank
from quire.core.scheduling.waiting import NUM_HEADS_RERANKED, RERANK_WINDOW, WaitingQueue
from quire.core.sequence import Sequence, SequenceState


class TenantPolicy(Policy):
    """By tenant, each with a key that the test sets; within one, by priority."""

    def __init__(self) -> None:
        self.keys: dict[Bucket, float] = {}

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return (sequence.priority,)

    def bucket(self, sequence: Sequence) -> Bucket:
        return sequence.tenant

    def bucket_key(self, bucket: Bucket) -> float:
        return self.keys.get(bucket, 0.0)


class MatchPolicy(Policy):
    """The longest match first; counts how often it is asked."""

    reranks = True
    reads_matches = True

    def __init__(self) -> None:
        self.num_reads = 0

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        self.num_reads += 1
        return (-sequence.num_matched_tokens,)


def make(order: int, *, tenant: str = "", priority: int = 0) -> Sequence:
    sequence = Sequence(f"r{order}", [1], DecodingParams(4), priority=priority)
    sequence.order, sequence.tenant = order, tenant
    return sequence


def fill(queue: WaitingQueue, sequences: list[Sequence]) -> list[Sequence]:
    for sequence in sequences:
        queue.enter(sequence, 0.0)
    return sequences


def orders(sequences: Iterator[Sequence]) -> list[int]:
    return [sequence.order for sequence in sequences]


def test_an_empty_queue_has_no_head() -> None:
    queue = WaitingQueue(FcfsPolicy())
    assert queue.head() is None
    assert (len(queue), list(queue), list(queue.candidates())) == (0, [], [])
    queue.refresh(0.0)


def test_buckets_take_turns_by_their_keys_and_ties_go_by_rank() -> None:
    policy = TenantPolicy()
    queue = WaitingQueue(policy)
    fill(queue, [make(0, tenant="x"), make(1, tenant="y"), make(2, tenant="x", priority=-1)])
    assert orders(queue.candidates()) == [2, 0, 1]
    policy.keys = {"x": 5.0}
    assert orders(queue.candidates()) == [1, 2, 0]
    assert orders(iter(queue)) == [2, 0, 1], "by rank, whatever the buckets"
    policy.keys = {}
    assert queue.head() is next(iter(queue))


def test_a_key_that_changes_during_a_walk_counts_for_the_rest_of_it() -> None:
    policy = TenantPolicy()
    queue = WaitingQueue(policy)
    fill(queue, [make(order, tenant="x" if order < 3 else "y") for order in range(6)])
    drawn = []
    for sequence in queue.candidates():
        drawn.append(sequence.order)
        policy.keys[sequence.tenant] = policy.keys.get(sequence.tenant, 0.0) + 1
    assert drawn == [0, 3, 1, 4, 2, 5]


def test_a_walk_survives_what_is_removed_and_added_under_it() -> None:
    queue = WaitingQueue(FcfsPolicy())
    sequences = fill(queue, [make(order) for order in range(10)])
    before = make(-1)
    drawn = []
    for sequence in queue.candidates():
        drawn.append(sequence.order)
        if sequence.order % 3 == 0:
            queue.remove(sequence)
        if sequence.order == 3:
            queue.remove(sequences[4])  # the next one
            queue.remove(sequences[2])  # one that was passed
            queue.enter(make(10), 0.0)
            queue.enter(before, 0.0)
    assert drawn == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert orders(iter(queue)) == [-1, 1, 5, 7, 8, 10]


def test_a_sequence_is_removed_from_its_queue_though_rank_and_tenant_changed() -> None:
    queue = WaitingQueue(TenantPolicy())
    first, second = fill(queue, [make(0, tenant="x"), make(1, tenant="x")])
    first.rank, first.tenant = (99.0,), "y"
    first.move_to(SequenceState.RUNNING)
    queue.remove(first)
    assert first not in queue
    assert second in queue
    assert list(queue) == [second]
    with pytest.raises(KeyError):
        queue.remove(first)


def test_a_random_history_gives_the_same_order_as_sorting() -> None:
    draws = random.Random(5)
    policy = TenantPolicy()
    queue = WaitingQueue(policy)
    present: list[Sequence] = []
    for order in range(600):
        if present and draws.random() < 0.45:
            sequence = present.pop(draws.randrange(len(present)))
            queue.remove(sequence)
        else:
            tenant, priority = draws.choice("xyz"), draws.randrange(4)
            present += fill(queue, [make(order, tenant=tenant, priority=priority)])
        policy.keys[draws.choice("xyz")] = draws.randrange(9)
        expected = sorted(
            present, key=lambda sequence: (policy.keys.get(sequence.tenant, 0.0), sequence.rank)
        )
        assert orders(queue.candidates()) == [sequence.order for sequence in expected]
        assert len(queue) == len(present)
        assert set(queue._buckets) == {sequence.tenant for sequence in present}, (
            "an empty bucket stayed"
        )


def test_ranks_are_read_anew_for_a_bounded_number_a_step() -> None:
    policy = MatchPolicy()
    queue = WaitingQueue(policy, lambda sequence: sequence.num_matched_tokens)
    fill(queue, [make(order) for order in range(3000)])
    policy.num_reads = 0
    for step in range(1, 50):
        queue.refresh(0.0)
        assert policy.num_reads <= step * (NUM_HEADS_RERANKED + 1)
    assert policy.num_reads >= 50, "nothing but the head was looked at"


def test_a_row_of_heads_that_have_become_worse_is_worked_off_by_and_by() -> None:
    policy = MatchPolicy()
    matches: dict[Sequence, int] = {}
    queue = WaitingQueue(policy, lambda sequence: matches.get(sequence, 0))
    sequences = [make(order) for order in range(100)]
    matches.update((sequence, 9 if sequence.order < 99 else 5) for sequence in sequences)
    fill(queue, sequences)
    matches.clear()
    matches[sequences[99]] = 5
    num_steps = 0
    while queue.head() is not sequences[99]:
        policy.num_reads = 0
        queue.refresh(0.0)
        num_steps += 1
        assert policy.num_reads <= NUM_HEADS_RERANKED + 1
        assert num_steps <= 100 / NUM_HEADS_RERANKED


def test_a_sequence_with_a_better_rank_moves_ahead_within_one_rerank_window() -> None:
    matches: dict[Sequence, int] = {}
    queue = WaitingQueue(MatchPolicy(), lambda sequence: matches.get(sequence, 0))
    sequences = fill(queue, [make(order) for order in range(100)])
    chosen = sequences[RERANK_WINDOW - 1]
    matches[chosen] = 7
    for _ in range(RERANK_WINDOW):
        queue.refresh(0.0)
    assert queue.head() is chosen
    assert len(queue) == 100
    matches[chosen] = 0
    queue.refresh(0.0)
    assert queue.head() is sequences[0], "a head that has become worse gives way at once"


def test_a_sequence_that_has_run_keeps_its_rank() -> None:
    policy = MatchPolicy()
    queue = WaitingQueue(policy, lambda sequence: 0)
    ran = make(0)
    ran.rank = (-5.0, 0.0)
    ran.move_to(SequenceState.RUNNING)
    ran.move_to(SequenceState.PREEMPTED)
    queue.add(ran)
    queue.refresh(0.0)
    assert policy.num_reads == 0
    assert queue.head() is ran


def test_forks_count_only_the_tokens_that_they_do_not_share() -> None:
    """Eight branches of a prompt, and one that left its parent before it was preempted."""
    queue = WaitingQueue(FcfsPolicy())
    first = Sequence("a", [1] * 50, DecodingParams(4))
    forks = [first.branch(index, first.params) for index in range(1, 8)]
    for order, fork in enumerate(forks, 1):
        fork.order = order
        fork.fork_from(first)
    fill(queue, [first, *forks])
    assert queue.num_tokens == 50
    queue.remove(forks[0])
    forks[0].stop_waiting_for_fork()
    forks[0].append(5)
    queue.add(forks[0])
    assert queue.num_tokens == 50 + 51
    for fork in forks[1:]:
        fork.stop_waiting_for_fork()  # their parent ends
    for sequence in (first, *forks):
        queue.remove(sequence)
    assert queue.num_tokens == 0


class CountedRank(tuple[float, ...]):
    """A rank that counts how often it is compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedRank.num_comparisons += 1
        return super().__eq__(other)

    def __lt__(self, other: tuple[float, ...]) -> bool:
        CountedRank.num_comparisons += 1
        return super().__lt__(other)

    __hash__ = tuple.__hash__


@pytest.mark.parametrize("num_waiting", [100, 10_000])
def test_an_operation_compares_as_often_as_a_search_does(num_waiting: int) -> None:
    queue = WaitingQueue(FcfsPolicy())
    draws = random.Random(2)
    sequences = [make(order) for order in range(num_waiting)]
    draws.shuffle(sequences)
    bound = 2 * (num_waiting.bit_length() + 2)

    def count() -> int:
        num, CountedRank.num_comparisons = CountedRank.num_comparisons, 0
        return num

    for sequence in sequences:
        sequence.rank = CountedRank((sequence.order,))
        count()
        queue.add(sequence)
        assert count() <= bound
    for sequence in sequences[: num_waiting // 2]:
        queue.remove(sequence)
        assert count() <= bound
    for sequence in queue.candidates():
        queue.remove(sequence)
        assert count() <= 2 * bound  # to go on after the one before, and to remove this one
    assert len(queue) == 0
