"""The store under random operations, kills and damage, against a dict of what was written."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tiers.disk.faulty_files import FaultyFiles, KilledError, disk_bytes, full_disk
from tests.tiers.disk.store_world import (
    OTHER,
    Opened,
    check_tails,
    name_of,
    names_in,
    order_of,
    read,
    segments,
    write,
)

from quire.tiers.disk.store import REWRITTEN_SHARE

BUDGET, SEGMENT = 40_000, 8_000
NUMBERS = range(1, 60)
number_lists = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=6, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """`written` is all that was ever written: what is found is a part of it, and comes right.

    What is found in this process is found in the next, however this one ends.
    """

    @initialize(has_leftovers=st.booleans())
    def begin(self, has_leftovers: bool) -> None:
        memory = Path("/dev/shm")
        self.temporary = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.path = Path(self.temporary.name)
        if has_leftovers:
            other = Opened(self.path, BUDGET, SEGMENT, FaultyFiles(), OTHER)
            write(other.store, range(1, 20))
            other.close()
        self.written: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.files = FaultyFiles()
        self.files.after = self.check_budget
        self.opened = Opened(self.path, BUDGET, SEGMENT, self.files)
        self.opened.store.prepare_to_write()
        for name in self.found():
            read(self.opened.store, [name])  # what was damaged is forgotten

    def check_budget(self) -> None:
        assert disk_bytes(self.path) <= BUDGET + SEGMENT * REWRITTEN_SHARE

    def found(self) -> set[bytes]:
        return set(names_in(self.opened.store, NUMBERS))

    @rule(numbers=number_lists)
    def write_some(self, numbers: list[int]) -> None:
        new = [number for number in numbers if order_of(number).name not in self.found()]
        if new:
            write(self.opened.store, new)
        self.written |= {order_of(number).name for number in new}
        assert {order_of(number).name for number in new} <= self.found()

    @rule(numbers=number_lists)
    def read_some(self, numbers: list[int]) -> None:
        names = [order_of(number).name for number in numbers]
        assert read(self.opened.store, names) == [name in self.found() for name in names]

    @rule(numbers=number_lists, fails_at=st.integers(1, 6))
    def write_on_a_full_disk(self, numbers: list[int], fails_at: int) -> None:
        new = [number for number in numbers if order_of(number).name not in self.found()]
        end = self.files.num_calls + fails_at
        self.files.fails_when = lambda name, given: (
            full_disk()
            if self.files.num_calls >= end and name in ("pwritev", "create", "sync_data")
            else None
        )
        with suppress(OSError):
            write(self.opened.store, new)
        self.files.fails_when = FaultyFiles().fails_when
        self.written |= self.found()

    @rule()
    def end_and_begin(self) -> None:
        before = self.found()
        self.opened.close()
        self.open()
        assert before <= self.found()

    @rule(numbers=number_lists, calls=st.integers(1, 12))
    def kill(self, numbers: list[int], calls: int) -> None:
        new = [number for number in numbers if order_of(number).name not in self.found()]
        self.files.kill_at = self.files.num_calls + calls
        try:
            write(self.opened.store, new)
            self.opened.close()
        except KilledError:
            pass
        before = self.found()
        self.files.release()
        self.written |= {order_of(number).name for number in new}
        self.open()
        assert before <= self.found() <= self.written

    @rule(which=st.integers(0, 20), where=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, which: int, where: float, bit: int) -> None:
        """In a file, while no process has it open."""
        self.opened.close()
        files = segments(self.path)
        if files:
            content = bytearray(files[which % len(files)].read_bytes())
            if content:
                content[int(where * (len(content) - 1))] ^= 1 << bit
            files[which % len(files)].write_bytes(content)
        self.open()

    @rule(which=st.integers(0, 20), where=st.floats(0, 1))
    def cut(self, which: int, where: float) -> None:
        self.opened.close()
        files = segments(self.path)
        if files:
            path = files[which % len(files)]
            os.truncate(path, int(where * path.stat().st_size))
        self.open()

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "opened"):
            return
        store = self.opened.store
        assert self.found() <= self.written
        assert len(self.found()) == len(store.index)
        names = sorted(self.found())
        assert all(read(store, names)), "what is found comes, until something damages it"
        check_tails(store, NUMBERS)
        assert store.index.find(0, name_of(10_000)) is False
        assert disk_bytes(self.path) <= store.used_bytes

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            self.files.release()
            self.temporary.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
