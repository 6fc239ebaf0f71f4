"""Slots for adapters: who gets one, who gives one up, and who waits."""

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.adapters import NO_SLOT
from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.adapter_residency import AdapterResidency
from quire.core.scheduling.admission import MAX_OVERTAKEN
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.scheduling.scheduler import fail_adapter
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import AdapterLoad


class Source:
    """Adapters are ready as soon as they are named here, and not while they are in `slow`."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.calls: list[str] = []

    def begin(self, digest: str) -> bool:
        self.calls.append(f"begin {digest}")
        return digest not in self.slow

    def release(self, digest: str) -> None:
        self.calls.append(f"release {digest}")


def make(num_slots: int) -> tuple[AdapterResidency, Source]:
    source = Source()
    return AdapterResidency(num_slots, source), source


def sequence(adapter: str) -> Sequence:
    made = Sequence("s", [1, 2], DecodingParams(4))
    made.adapter = adapter
    return made


def test_the_base_model_needs_no_slot():
    adapters, source = make(0)
    base = sequence("")
    assert adapters.has_slot_for(base) and adapters.prepare(base)
    assert adapters.acquire_slot(base) is None and base.adapter_slot == NO_SLOT
    adapters.release_slot(base)
    assert not source.calls


def test_an_engine_without_adapters_has_none():
    adapters = AdapterResidency()
    assert not adapters.has_slot_for(sequence("a"))


def test_an_adapter_is_loaded_once_and_stays():
    adapters, _ = make(2)
    first, second = sequence("a"), sequence("a")
    assert adapters.prepare(first) and adapters.num_resident == 0
    assert adapters.acquire_slot(first) == AdapterLoad(0, "a")
    assert adapters.acquire_slot(second) is None
    assert first.adapter_slot == second.adapter_slot == 0
    adapters.check([first, second])
    adapters.release_slot(first)
    adapters.release_slot(second)
    assert first.adapter_slot == NO_SLOT and adapters.num_resident == 1
    assert adapters.prepare(first) and adapters.acquire_slot(first) is None
    assert adapters.num_loads == 1


def test_a_slot_goes_from_the_least_recently_used():
    adapters, _ = make(2)
    for name in "aba":
        user = sequence(name)
        adapters.prepare(user)
        adapters.acquire_slot(user)
        adapters.release_slot(user)
    adapters.prepare(sequence("c"))
    assert adapters.slots() == {"a": 0, "c": 1}


def test_adapters_without_requests_lose_their_slots_first():
    adapters, _ = make(2)
    users = [sequence("a"), sequence("b")]
    for user in users:
        adapters.count_sequence(user)
        adapters.prepare(user)
        adapters.acquire_slot(user)
        adapters.release_slot(user)
    adapters.end(users[1])
    adapters.prepare(sequence("c"))
    assert adapters.slots() == {"a": 0, "c": 1}


def test_a_slot_in_use_or_being_filled_is_not_reassigned():
    adapters, source = make(2)
    user = sequence("a")
    adapters.prepare(user)
    adapters.acquire_slot(user)
    source.slow.add("b")
    assert not adapters.prepare(sequence("b")) and adapters.num_reading == 1
    assert adapters.awaits(sequence("b")) and not adapters.has_slot_for(sequence("c"))
    source.slow.clear()
    adapters.refresh()
    assert not adapters.awaits(sequence("b")) and adapters.has_slot_for(sequence("c"))


def test_an_unused_adapter_is_released():
    adapters, source = make(1)
    adapters.prepare(sequence("a"))
    adapters.prepare(sequence("b"))
    assert "release a" in source.calls and adapters.slots() == {"b": 0}
    adapters.clear()
    assert source.calls[-1] == "release b" and not adapters.slots()


def test_an_unreadable_adapter_gives_its_slot_back():
    adapters, source = make(1)
    source.slow.add("a")
    adapters.prepare(sequence("a"))
    adapters.drop("a")
    assert adapters.slots() == {} and adapters.num_reading == 0
    adapters.drop("never was")


def test_a_wrong_count_is_found():
    adapters, _ = make(1)
    with pytest.raises(AssertionError, match="adapters in use"):
        adapters.check([sequence("a")])


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
    outputs = fail_adapter(harness.scheduler, "broken", "it is gone")
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
    assert plan.adapter_loads == (AdapterLoad(0, "a"),)
    harness.recover()
    assert harness.step().adapter_loads == (AdapterLoad(0, "a"),)
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
