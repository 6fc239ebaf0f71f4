"""Pages on other nodes are moved in pieces, while nothing else is to be done."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from tests.numa.fake_calls import FakeCalls
from tests.numa.trees import FOUR_NODES, TWO_NODES

from quire.numa.binding import Binding
from quire.numa.planning import plan
from quire.numa.regions import Region
from quire.numa.stragglers import (
    AGAIN_S,
    ASKED_PAGES,
    IDLE_S,
    MOVED_PAGES,
    PAUSE_S,
    PIECE_S,
    Stragglers,
)
from quire.numa.system_calls import PAGE_BYTES, LinuxCalls
from quire.numa.topology import read_topology

NUM_PAGES = 3000
BEGIN = 1 << 20


class Clock:
    """Goes on with each look at it."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture
def calls() -> FakeCalls:
    """All pages are there; every third is on the other node."""
    made = FakeCalls()
    made.where = {BEGIN + i * PAGE_BYTES: 0 if i % 3 == 0 else 1 for i in range(NUM_PAGES)}
    return made


def stragglers(calls: FakeCalls, root: Path, clock: Clock) -> Stragglers:
    topology = read_topology(TWO_NODES.write(root))
    bound = Binding(plan(topology, 2)[1], topology, 4, calls=calls)
    assert bound.leaves_nodes
    regions: list[Region] = [(BEGIN, BEGIN + (NUM_PAGES + 9) * PAGE_BYTES)]
    return Stragglers(bound, clock=clock, regions=lambda: regions)


def test_an_engine_that_is_not_idle_yet_is_left_alone(calls: FakeCalls, tmp_path: Path) -> None:
    work = stragglers(calls, tmp_path, Clock(0.0))
    assert work.search_when_idle(0.0) == IDLE_S
    assert work.search_when_idle(IDLE_S / 4) == 0.75 * IDLE_S
    assert calls.made == []


def test_all_are_moved_piece_by_piece(calls: FakeCalls, tmp_path: Path) -> None:
    clock = Clock(PIECE_S / 3)
    work = stragglers(calls, tmp_path, clock)
    num_pieces = 0
    while (wait_s := work.search_when_idle(IDLE_S)) == PAUSE_S:
        num_pieces += 1
        assert len(calls.made) <= 4 * num_pieces, "a piece ends after PIECE_S"
        clock.now_s += PAUSE_S
    assert wait_s == AGAIN_S
    assert set(calls.where.values()) == {1}
    assert (work.num_moved_pages, work.num_stuck_pages) == (NUM_PAGES // 3, 0)
    assert {size for _, size in calls.made} <= set(range(1, MOVED_PAGES + 1))
    assert num_pieces >= NUM_PAGES // 3 // MOVED_PAGES // 4


def test_later_all_is_looked_through_again(calls: FakeCalls, tmp_path: Path) -> None:
    clock = Clock(0.0)
    work = stragglers(calls, tmp_path, clock)
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    calls.where[BEGIN] = 0
    clock.now_s = AGAIN_S / 2
    assert work.search_when_idle(IDLE_S) == AGAIN_S / 2
    assert calls.where[BEGIN] == 0
    clock.now_s = AGAIN_S
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    assert calls.where[BEGIN] == 1
    assert work.num_moved_pages == 1


def test_pages_that_stay_are_counted_and_left(
    calls: FakeCalls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls.stuck = {BEGIN, BEGIN + 3 * PAGE_BYTES}
    work = stragglers(calls, tmp_path, Clock(0.0))
    with caplog.at_level("INFO", "quire.numa"):
        assert work.search_when_idle(IDLE_S) == AGAIN_S
    assert work.num_stuck_pages == 2
    assert caplog.messages == [
        "numa: 998 pages were moved to node 1 while idle; 2 could not be moved"
    ]


def test_a_page_that_ends_a_call_does_not_keep_others(calls: FakeCalls, tmp_path: Path) -> None:
    calls.ends_at = {BEGIN + 3 * i * PAGE_BYTES for i in (0, 40, 41, 999)}
    work = stragglers(calls, tmp_path, Clock(0.0))
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    assert (work.num_moved_pages, work.num_stuck_pages) == (996, 4)


def test_a_huge_page_moves_once(tmp_path: Path) -> None:
    calls, huge = FakeCalls(), 2 << 20
    calls.huge_pages = True
    calls.where = {address: 4 for address in range(huge, 4 * huge, PAGE_BYTES)}
    topology = read_topology(FOUR_NODES.write(tmp_path))
    bound = Binding(plan(topology, 2)[0], topology, 4, calls=calls)
    own = bound.part.memory_nodes
    assert len(own) == 2 and 4 not in own
    work = Stragglers(bound, clock=Clock(0.0), regions=lambda: [(huge, 4 * huge)])
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    by_page = [
        {calls.where[each] for each in range(n * huge, n * huge + huge, PAGE_BYTES)}
        for n in (1, 2, 3)
    ]
    assert all(len(nodes) == 1 for nodes in by_page) and set.union(*by_page) == set(own)
    assert work.num_stuck_pages == 0


def test_a_full_node_is_tried_again_later(calls: FakeCalls, tmp_path: Path) -> None:
    clock = Clock(0.0)
    work = stragglers(calls, tmp_path, clock)
    calls.refused = errno.ENOMEM
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    calls.refused, clock.now_s = None, AGAIN_S
    assert work.search_when_idle(IDLE_S) == AGAIN_S
    assert set(calls.where.values()) == {1}


def test_where_it_is_refused_nothing_is_tried_again(calls: FakeCalls, tmp_path: Path) -> None:
    calls.refused = errno.EPERM
    work = stragglers(calls, tmp_path, Clock(0.0))
    assert work.search_when_idle(IDLE_S) is None
    calls.refused = None
    assert work.search_when_idle(IDLE_S) is None
    assert calls.made == []


def test_the_system_reports_the_nodes_of_pages() -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this system has no NUMA")
    memory = np.zeros(2 * ASKED_PAGES * PAGE_BYTES, np.uint8)
    begin = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    memory[: begin - memory.ctypes.data + 8 * PAGE_BYTES] = 1
    pages = np.arange(begin, begin + 8 * PAGE_BYTES, PAGE_BYTES, dtype=np.uint64)
    calls = LinuxCalls()
    nodes = calls.nodes_of(pages)
    there = {node.id for node in read_topology().nodes}
    assert set(nodes.tolist()) <= there
    assert calls.move(pages, nodes).tolist() == nodes.tolist()
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        calls.move(pages[:1], np.array([1000], np.int32))
