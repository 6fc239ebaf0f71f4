"""Slots of the host's memory: what they hold, what makes room, what moves keep in place."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.memory.tiers.contract import Tail
from quire.tiers.host.slot_table import MAX_TAILS, Key, SlotTable


def fill(table: SlotTable, number: int, parent: bytes = b"", tokens: bytes = b"") -> int | None:
    slot = table.acquire()
    if slot is not None:
        table.record_content(slot, (0, bytes([number])), parent, tokens)
        table.unpin(slot)
    return slot


def test_the_one_used_longest_ago_makes_room() -> None:
    table = SlotTable(3)
    assert [fill(table, number) for number in range(3)] == [0, 1, 2]
    table.pin(0)
    table.unpin(0)
    assert fill(table, 3) == 1
    assert [table.find((0, bytes([number]))) for number in range(4)] == [0, None, 2, 1]
    assert table.num_evicted == 1


def test_pinned_slots_are_not_replaced() -> None:
    table = SlotTable(2)
    fill(table, 0)
    table.pin(0)
    assert fill(table, 1) == fill(table, 2) == 1
    table.pin(1)
    assert table.acquire() is None and table.num_takeable == 0
    table.forget_all()
    assert table.find((0, b"\0")) is None and table.acquire() is None
    table.unpin(1)
    assert table.acquire() == 1, "it has no content any more"


def test_a_content_has_one_slot() -> None:
    table = SlotTable(2)
    fill(table, 7)
    other = table.acquire()
    assert other == 1 and not table.record_content(other, (0, b"\7"))
    table.unpin(other)
    assert len(table) == 1 and table.acquire() == other


def test_tails_go_with_their_content() -> None:
    table = SlotTable(MAX_TAILS + 3)
    for number in range(MAX_TAILS + 2):
        slot = table.acquire()
        assert slot is not None
        table.record_content(slot, (number % 2, number.to_bytes(2, "big")), b"parent", b"tokens")
        table.unpin(slot)
    first, last = (0, b"\0\0"), MAX_TAILS + 1
    tails = table.tails(b"parent")
    assert tails[0] == Tail(b"tokens", last.to_bytes(2, "big")) and len(tails) == MAX_TAILS
    assert table.tail_parts(first) == (b"parent", b"tokens")
    for number in range(2):
        fill(table, number)
    assert table.find(first) is None and table.tail_parts(first) == (b"", b"")
    table.forget_all()
    assert table.tails(b"parent") == []


class SlotMachine(RuleBasedStateMachine):
    """Beside a model: contents in the order of their last use, and pins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(5)
        self.contents: dict[Key, int] = {}  # the one used longest ago first
        self.pins: list[int] = []
        self.taken: list[int] = []

    @rule()
    def acquire(self) -> None:
        idle = [key for key, slot in self.contents.items() if not self.is_pinned(slot)]
        has_free = len(self.contents) + len(self.taken) + self.num_forgotten() < 5
        slot = self.table.acquire()
        assert (slot is not None) == (has_free or bool(idle))
        if slot is None:
            return
        if not has_free:
            assert self.contents.pop(idle[0]) == slot
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(number=st.integers(0, 9))
    def record_content(self, number: int) -> None:
        slot, key = self.taken.pop(0), (0, bytes([number]))
        assert self.table.record_content(slot, key) == (key not in self.contents)
        self.contents.setdefault(key, slot)
        self.table.unpin(slot)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.contents)))
        self.contents[key] = self.contents.pop(key)
        self.table.pin(self.contents[key])
        self.pins.append(self.contents[key])

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        slot = self.pins.pop(0)
        self.table.unpin(slot)
        for key in [key for key, held in self.contents.items() if held == slot]:
            self.contents[key] = self.contents.pop(key)

    @rule()
    def forget_all(self) -> None:
        self.table.forget_all()
        self.contents.clear()

    def is_pinned(self, slot: int) -> bool:
        return slot in self.pins or slot in self.taken

    def num_forgotten(self) -> int:
        return len(set(self.pins) - set(self.contents.values()))

    @invariant()
    def agree(self) -> None:
        assert len(self.table) == len(self.contents)
        assert all(self.table.find(key) == slot for key, slot in self.contents.items())
        num_pinned = len({*self.pins, *self.taken})
        assert self.table.num_takeable == self.table.num_slots - num_pinned


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
