"""Slots for adapters and contents: who gets one, who gives one up, and who waits."""

from collections import Counter

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.adapters import NO_SLOT
from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.admission import MAX_OVERTAKEN
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import fail_item
from quire.core.sequence import SequenceState
from quire.core.step import ItemLoad


class Source:
    """Items are ready as soon as they are named here, and not while they are in `slow`."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.calls: list[str] = []

    def begin(self, digest: str) -> bool:
        self.calls.append(f"begin {digest}")
        return digest not in self.slow

    def release(self, digest: str) -> None:
        self.calls.append(f"release {digest}")


def make(num_slots: int) -> tuple[Residency, Source]:
    source = Source()
    return Residency(num_slots, source), source


def load_and_release(items: Residency, digest: str) -> None:
    assert items.prepare(digest)
    items.acquire(digest)
    items.take_load(digest)
    items.release(digest)


def test_nothing_needs_no_slot():
    items, source = make(0)
    assert items.has_slot_for("") and items.prepare("")
    assert items.acquire("") == NO_SLOT and items.take_load("") is None
    items.release("")
    assert not source.calls


def test_an_engine_without_items_has_no_slots():
    assert not Residency().has_slot_for("a")


def test_an_item_is_loaded_once_and_stays():
    items, _ = make(2)
    assert items.prepare("a") and items.num_resident == 0
    assert items.acquire("a") == 0 and items.take_load("a") == ItemLoad(0, "a")
    assert items.acquire("a") == 0 and items.take_load("a") is None
    items.check(Counter(a=2))
    items.release("a")
    items.release("a")
    assert items.num_resident == 1
    assert items.prepare("a") and items.take_load("a") is None
    assert items.num_loads == 1


def test_a_slot_goes_from_the_least_recently_used():
    items, _ = make(2)
    for digest in "aba":
        load_and_release(items, digest)
    items.prepare("c")
    assert items.slots() == {"a": 0, "c": 1}


def test_items_without_requests_lose_their_slots_first():
    items, _ = make(2)
    for digest in "ab":
        items.add_demand(digest)
        load_and_release(items, digest)
    items.end_demand("b")
    items.prepare("c")
    assert items.slots() == {"a": 0, "c": 1}


def test_a_slot_in_use_or_being_filled_is_not_reassigned():
    items, source = make(2)
    items.prepare("a")
    items.acquire("a")
    items.take_load("a")
    source.slow.add("b")
    assert not items.prepare("b") and items.num_reading == 1
    assert items.is_reading("b") and not items.has_slot_for("c")
    source.slow.clear()
    items.refresh()
    assert not items.is_reading("b") and items.has_slot_for("c")


def test_an_unused_item_is_released():
    items, source = make(1)
    items.prepare("a")
    items.prepare("b")
    assert "release a" in source.calls and items.slots() == {"b": 0}
    items.clear()
    assert source.calls[-1] == "release b" and not items.slots()


def test_an_unreadable_item_gives_its_slot_back():
    items, source = make(1)
    source.slow.add("a")
    items.prepare("a")
    items.drop("a")
    assert items.slots() == {} and items.num_reading == 0
    items.drop("never was")


def test_a_wrong_count_is_found():
    items, _ = make(1)
    with pytest.raises(AssertionError, match="in use are"):
        items.check(Counter(a=1))


# ---- with a scheduler ---------------------------------------------------------------------------


def make_harness(num_slots: int, **more) -> tuple[Harness, Source]:
    adapters, source = make(num_slots)
    return Harness(make_memory(64), adapters=adapters, **more), source


def test_all_get_their_own_tokens():
    harness, _ = make_harness(2, max_num_seqs=8)
    for name in ("a", "b", "c", ""):
        harness.add_branches(f"with {name}", [5, 6, 7, 8, 9, 10, 11, 12], n=2, adapter=name)
    harness.run()
    answers = {tuple(harness.received[f"with {name}"]) for name in ("a", "b", "c", "")}
    assert len(answers) == 4


def test_others_go_on_while_an_adapter_is_read():
    harness, source = make_harness(1)
    source.slow.add("a")
    waiting = harness.add("slow", 8, adapter="a")
    base = harness.add("base", 8, 4)
    while not base.is_finished:
        harness.step()
    assert waiting.state is SequenceState.WAITING
    assert harness.scheduler.schedule(0.0) is None  # and no stall
    source.slow.clear()
    harness.run()


def test_a_broken_adapter_ends_its_own_requests():
    harness, source = make_harness(2)
    source.slow.add("broken")
    harness.add_branches("lost", 8, n=2, adapter="broken")
    beams = DecodingParams(4, beam_width=2, logprobs=4)
    harness.add("beams", 8, params=beams, adapter="broken")
    harness.add("fine", 8, adapter="a")
    harness.step()
    outputs = fail_item(harness.scheduler, "broken", "it is gone")
    assert [output.error for output in outputs] == ["it is gone"] * 4
    assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
    harness._note(outputs)
    harness.check()
    harness.run()
    assert harness.ended["fine"].finish_reason is FinishReason.LENGTH


def test_a_sequence_without_a_slot_is_overtaken_a_bounded_number_of_times():
    """A crowd with one adapter never ends, and one request wants the only slot for another."""
    harness, _ = make_harness(1, max_num_seqs=3)
    harness.add("crowd 0", 4, 6, adapter="a")
    harness.step()
    other = harness.add("other", 4, 6, adapter="b")
    for index in range(1, 200):
        harness.add(f"crowd {index}", 4, 6, adapter="a")
        harness.step()
        if other.num_admissions:
            break
    assert other.num_admissions and other.num_overtaken <= MAX_OVERTAKEN
    harness.run()


def test_beams_count_as_requests_for_their_adapter():
    harness, _ = make_harness(2)
    beams = DecodingParams(4, beam_width=3, logprobs=6)
    harness.add("beams", 8, params=beams, adapter="a")
    while harness.scheduler.has_unfinished:
        assert harness.scheduler.adapters._demand["a"] > 0
        harness.step()
    assert not harness.scheduler.adapters._demand


def test_a_sequence_that_outranks_all_users_of_a_slot_takes_it():
    harness, _ = make_harness(1, policy=PriorityPolicy())
    low = harness.add("low", 8, 20, priority=5, adapter="a")
    base = harness.add("base", 8, 20, priority=9)
    harness.step()
    high = harness.add("high", 8, 4, priority=1, adapter="b")
    harness.step()
    assert high.row is not None and low.state is SequenceState.PREEMPTED
    assert base.row is not None  # it holds no slot
    harness.run()


def test_an_outranked_sequence_waits_for_a_slot():
    harness, _ = make_harness(1, policy=PriorityPolicy())
    high = harness.add("high", 8, 6, priority=1, adapter="a")
    harness.add("base", 8, 20, priority=9)
    harness.step()
    middle = harness.add("middle", 8, 4, priority=5, adapter="b")
    harness.step()
    assert high.row is not None and middle.row is None
    harness.run()


def test_a_failed_step_forgets_what_the_slots_have():
    harness, _ = make_harness(2)
    harness.add("a", 8, adapter="a")
    plan = harness.step()
    assert plan.adapter_loads == (ItemLoad(0, "a"),)
    harness.recover()
    assert harness.step().adapter_loads == (ItemLoad(0, "a"),)
    harness.run()


def test_a_suspect_gets_a_slot_for_its_trial():
    harness, _ = make_harness(1)
    harness.add("a", 8, 20, adapter="a")
    harness.step()
    harness.add("b", 8, 20, adapter="b")
    for _ in range(3):
        harness.recover()
        if harness.scheduler.has_unfinished:
            harness.step()
    harness.run()


def test_prefixes_are_shared_within_an_adapter_only():
    harness, _ = make_harness(3)
    prompt = list(range(1, 17))
    for index, adapter in enumerate(["", "a", "b", "a", ""]):
        harness.add(f"r{index}", prompt, 4, adapter=adapter)
        harness.run()
    cached = [harness.requests[f"r{index}"][1].num_cached_tokens for index in range(5)]
    assert cached == [0, 0, 0, 15, 15]
