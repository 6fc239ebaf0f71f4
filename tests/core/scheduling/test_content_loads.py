"""Rows wait for the contents that they read next, and for nothing else."""

import pytest
from tests.core.harness import Harness, make_memory
from tests.core.scheduling.test_residency import Source, make

from quire.core.content_spans import ContentSpan
from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.scheduling.scheduler import fail_item
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import ItemLoad

A, B, C = ("aa" * 16, "bb" * 16, "cc" * 16)
PROMPT = [5] * 24


def make_harness(num_slots: int, num_blocks: int = 64, **more) -> tuple[Harness, Source]:
    contents, source = make(num_slots)
    harness = Harness(make_memory(num_blocks), **more)
    harness.scheduler.contents = contents
    harness.scheduler.running_set.content_loads.residency = contents
    return harness, source


def add(harness: Harness, name: str, *spans: tuple[int, int, str], **more) -> Sequence:
    """A request with the prompt of all; spans: first position, length and content of each."""
    harness.content_spans = tuple(ContentSpan(*span) for span in spans)
    return harness.add(name, PROMPT, 4, **more)


def test_prompts_of_equal_placeholders_share_up_to_their_first_difference():
    harness, _ = make_harness(3)
    for name, content in [("a", A), ("b", B), ("a again", A), ("text", "")]:
        add(harness, name, *([(6, 10, content)] if content else []))
        harness.run()
    cached = {name: entry[1].num_cached_tokens for name, entry in harness.requests.items()}
    assert cached == {"a": 0, "b": 6, "a again": 23, "text": 6}
    assert len({tuple(harness.received[name]) for name in ("a", "b", "text")}) == 3


def test_a_prompt_under_way_is_followed_only_by_those_with_its_contents():
    harness, _ = make_harness(3, max_num_seqs=8, budget=16)
    add(harness, "first", (6, 10, A))
    harness.step()
    other, same = add(harness, "other", (6, 10, B)), add(harness, "same", (6, 10, A))
    harness.step()
    assert other.state is SequenceState.RUNNING and same.state is SequenceState.WAITING
    harness.run()
    assert same.num_cached_tokens >= 16 and other.num_cached_tokens == 6


def test_a_content_is_loaded_by_the_plan_that_reads_it_first():
    harness, _ = make_harness(2, budget=8)
    add(harness, "r", (2, 10, A), (14, 4, B))
    assert harness.step().content_loads == (ItemLoad(0, A),)
    second = harness.step()  # goes on in the middle of the first, and begins the second
    assert second.content_loads == (ItemLoad(1, B),) and second.chunks[0].num_new_tokens == 8
    assert harness.step().content_loads == ()
    harness.run()


def test_a_chunk_ends_before_a_content_that_is_not_ready():
    harness, source = make_harness(2)
    source.slow |= {A, B}
    sequence = add(harness, "r", (6, 4, A), (12, 4, B))
    assert harness.step().chunks[0].num_new_tokens == 6
    assert harness.scheduler.schedule(0.0) is None, "nothing else to compute, and no stall"
    assert harness.scheduler.contents.num_reading == 2, "both are read at once"
    source.slow.remove(B)
    assert harness.scheduler.schedule(0.0) is None
    source.slow.clear()
    harness.step()
    assert sequence.num_computed_tokens == len(PROMPT)
    harness.run()


def test_a_prompt_that_begins_with_a_content_waits_without_a_row():
    harness, source = make_harness(1)
    source.slow.add(A)
    waiting, other = add(harness, "waits", (0, 4, A)), add(harness, "text")
    while not other.is_finished:
        harness.step()
    assert waiting.state is SequenceState.WAITING
    source.slow.clear()
    harness.run()


def test_one_slot_serves_contents_one_after_the_other():
    harness, _ = make_harness(1)
    add(harness, "r", (0, 4, A), (4, 4, B), (8, 4, A), (12, 4, C))
    loads = [harness.step().content_loads for _ in range(4)]
    assert loads == [(ItemLoad(0, digest),) for digest in (A, B, A, C)]
    harness.run()


def test_the_first_in_rank_gets_the_slot_that_others_were_to_read_from():
    harness, _ = make_harness(1, policy=PriorityPolicy(), budget=6)
    low = add(harness, "low", (0, 20, A), priority=5)
    harness.step()
    high = add(harness, "high", (0, 20, B), priority=1)
    harness.step()
    assert low.num_computed_tokens and not high.num_computed_tokens, "the plan reads from it"
    while not high.is_finished or not low.is_finished:
        harness.step()
    harness.run()


def test_contents_are_not_in_use_between_plans():
    harness, _ = make_harness(2, budget=8)
    add(harness, "r", (2, 20, A))
    harness.step()
    assert harness.scheduler.contents.slots() == {A: 0}
    assert not harness.scheduler.contents._users


def test_a_failed_step_forgets_what_the_slots_have():
    harness, _ = make_harness(2, budget=8)
    add(harness, "r", (2, 20, A))
    assert harness.step().content_loads
    harness.recover()
    assert harness.step().content_loads == (ItemLoad(0, A),)
    harness.run()


def test_a_suspect_waits_for_its_content():
    harness, source = make_harness(1, budget=8)
    add(harness, "r", (2, 20, A))
    harness.step()
    source.slow.add(A)
    harness.recover()
    assert harness.scheduler.schedule(0.0) is None, "it continues in the middle of its content"
    source.slow.clear()
    harness.run()


def test_a_broken_content_ends_those_that_still_need_it():
    harness, source = make_harness(2)
    source.slow.add(B)
    past = add(harness, "past", (0, 4, A))
    lost = add(harness, "lost", (0, 4, A), (8, 4, B))
    beams = DecodingParams(4, beam_width=2, logprobs=4)
    add(harness, "beams", (8, 4, B), params=beams)
    harness.step()
    outputs = fail_item(harness.scheduler, B, "it is gone")
    assert [output.error for output in outputs] == ["it is gone"] * 3
    assert fail_item(harness.scheduler, A, "read already") == []
    harness._note(outputs)
    harness.run()
    assert past.finish_reason is FinishReason.LENGTH and lost.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("is_early", [True, False])
def test_forks_read_the_contents_of_their_parents(is_early):
    harness, _ = make_harness(1, budget=8)
    parent = add(harness, "r", (2, 14, A))
    harness.step()
    if not is_early:
        while parent.num_output_tokens < 2:
            harness.step()
    child = harness.fork(parent, 1)
    assert child.content_spans == parent.content_spans
    harness.run()


def test_nobody_is_preempted_for_a_request_whose_content_is_being_read():
    harness, source = make_harness(1, 12, policy=PriorityPolicy())
    source.slow.add(A)
    harness.add("low", 24, 20, priority=5)
    for _ in range(3):
        harness.step()
    harness.content_spans = (ContentSpan(0, 4, A),)
    harness.add("high", [5] * 30, 6, priority=1)
    harness.content_spans = ()
    for _ in range(14):
        harness.step()
    stats = harness.scheduler.running_set.stats
    assert stats.num_preemptions <= 1
    source.slow.clear()
    harness.run()
