"""Contents that one step computes whole: no chunk, hit or preemption ends inside one."""

from itertools import accumulate

import pytest
from tests.core.harness import Harness, make_memory
from tests.core.scheduling.test_pacing import make_pacer, open_paced
from tests.core.scheduling.test_residency import make

from quire.core.content_spans import ContentSpan, chunk_within, first_cut, last_cut
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.scheduling.pacing import StepBudget
from quire.core.sequence import Sequence
from quire.errors import RequestNeverFitsError

A, B = "aa" * 16, "bb" * 16
SPANS = (
    ContentSpan(3, 4, A, in_one_step=True),
    ContentSpan(7, 2, B),
    ContentSpan(9, 1, A, in_one_step=True),
    ContentSpan(10, 6, B, in_one_step=True),
)
PROMPT = [5] * 24


def make_harness(memory: KVCacheManager | None = None, **more) -> Harness:
    contents, _ = make(4)
    harness = Harness(memory or make_memory(64), **more)
    harness.scheduler.contents = contents
    harness.scheduler.running_set.content_loads.residency = contents
    return harness


def add(harness: Harness, name: str, *spans: tuple[int, int, str], **more) -> Sequence:
    """A request with the prompt of all; spans: first position, length and content of each."""
    harness.content_spans = tuple(ContentSpan(*span, None, True) for span in spans)
    return harness.add(name, PROMPT, 4, **more)


def prefill(harness: Harness, sequence: Sequence) -> list[int]:
    """Numbers of computed tokens after each step, until the prompt is computed."""
    found = []
    while sequence.num_computed_tokens < len(PROMPT):
        harness.step()
        found.append(sequence.num_computed_tokens)
    return found


def test_positions_at_which_a_step_may_end():
    inside = [4, 5, 6, 11, 12, 13, 14, 15]
    for position in range(20):
        is_cut = position not in inside
        assert (last_cut(SPANS, position) == position) == is_cut
        assert (first_cut(SPANS, position) == position) == is_cut
    assert [last_cut(SPANS, at) for at in (6, 15)] == [3, 10]
    assert [first_cut(SPANS, at) for at in (4, 11)] == [7, 16]
    assert [chunk_within(SPANS, 0, most) for most in (1, 3, 5, 7, 12)] == [1, 3, 3, 7, 10]
    assert [chunk_within(SPANS, 3, most) for most in (1, 4, 5)] == [4, 4, 5]
    assert chunk_within((), 3, 5) == 5


def test_a_chunk_ends_before_a_content_or_has_all_of_it():
    harness = make_harness(budget=8)
    # The second content is longer than the budget: this one step computes more.
    assert prefill(harness, add(harness, "r", (5, 4, A), (9, 11, B))) == [5, 9, 20, 24]
    harness.run()


def test_budgets_exceed_their_tokens_and_their_time_for_one_content_only():
    span = (ContentSpan(0, 1500, A, in_one_step=True),)
    for budget in (StepBudget(16), open_paced(make_pacer())):
        assert budget.take_chunk(0, 1600, spans=span) == 1500
        assert budget.load.num_chunk_tokens == 1500 and budget.is_spent


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_hit_ends_before_a_content_whose_tokens_are_not_all_cached(num_groups: int):
    harness = make_harness(make_memory(64, 4, num_groups))
    add(harness, "first", (6, 10, A))
    harness.run()
    # The same content follows the same tokens, but is longer than what is cached of it.
    cached = {}
    for name, spans in {
        "same": ((6, 10, A),),
        "longer": ((6, 14, A),),
        "behind": ((6, 10, A), (16, 4, B)),
        "other": ((6, 10, B),),
    }.items():
        add(harness, name, *spans)
        harness.run()
        cached[name] = harness.requests[name][1].num_cached_tokens
    assert cached == {"same": 23, "longer": 6, "behind": 16, "other": 6}


def test_a_full_pool_leaves_out_the_part_before_a_content():
    """The copied part would take one block more than there is; what remains ends at a cut, too."""
    harness = make_harness(make_memory(7))
    add(harness, "first", (2, 4, A), (6, 10, A))
    harness.run()
    sequence = add(harness, "longer", (2, 4, A), (6, 14, A))
    match = harness.memory.match(sequence)
    assert match.num_tokens in (0, 2, 6)
    harness.run()


@pytest.mark.parametrize("num_wanted", range(1, 7))
def test_a_preempted_sequence_keeps_no_part_of_a_content(num_wanted: int):
    harness = make_harness()
    sequence = add(harness, "r", (5, 4, A), (9, 11, B))
    prefill(harness, sequence)
    harness.scheduler.running_set.preempt(sequence, num_wanted)
    # The sequence has 6 blocks of 4 tokens. The ends of the second to the fifth split contents.
    assert sequence.num_computed_tokens == {1: 20}.get(num_wanted, 4 * (num_wanted < 6))
    harness.run()


def test_a_window_has_room_for_all_of_a_content():
    groups = (KVGroup((0,), KVKind.WINDOW, 64, window=5), KVGroup((1,), KVKind.FULL, 64))
    sizes = []
    for num_blocks in (15, 16):
        memory = KVCacheManager(KVCacheConfig(groups, num_blocks, 4, True, b"secret"))
        harness = make_harness(memory, budget=7)
        if num_blocks == 15:
            with pytest.raises(RequestNeverFitsError):
                add(harness, "r", (3, 2, A), (5, 18, B))
            add(harness, "text")
        else:
            sizes = prefill(harness, add(harness, "r", (3, 2, A), (5, 18, B)))
        harness.run()
    assert sizes == [5, 23, 24]


def test_a_second_prompt_waits_for_the_rest_of_a_content_that_is_under_way():
    harness = make_harness(budget=8, max_num_seqs=8)
    first = add(harness, "first", (2, 12, A))
    sizes = []
    for _ in range(2):
        harness.step()
        sizes.append(first.num_computed_tokens)
    assert sizes == list(accumulate([2, 12]))
    second = add(harness, "second", (2, 12, A))
    harness.run()
    assert second.num_cached_tokens >= 14
