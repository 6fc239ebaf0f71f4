"""Moves pages from other memory nodes to the process's own nodes, while an engine is idle.

A page lies on another node if it was written before memory was bound, or while its own node was
full. All private anonymous memory of the process is searched in pieces. A piece starts only after
the engine has been idle for IDLE_S, and takes at most about PIECE_S, so that an arriving request
waits no longer. Called between the iterations of the loops of engines and ranks.
"""

import errno
import time
from collections.abc import Callable, Iterator

import numpy as np

from quire.numa.binding import REFUSALS, Binding
from quire.numa.regions import Region, anonymous_memory
from quire.numa.system_calls import PAGE_BYTES, UNTRIED, Addresses, LinuxCalls
from quire.observability.log import get_logger

IDLE_S = 1.0
"""Seconds without work after which pages are moved."""
PIECE_S = 0.001
PAUSE_S = 0.01
"""Seconds between two pieces, so that other processes get most of the processor time."""
AGAIN_S = 600.0
"""Seconds between two searches of all memory; new pages appear as the KV cache fills."""

ASKED_PAGES, MOVED_PAGES = 1024, 32
"""Maximum number of pages that one system call locates, and maximum number that one moves."""
HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page if pages have 4 KiB. With larger pages, huge pages are multiples of it."""

logger = get_logger(__name__)


class Stragglers:
    """Finds and moves the pages of one process that lie outside its part of the machine.

    Invariant: a call takes at most PIECE_S plus the time of one system call on MOVED_PAGES pages.
    """

    def __init__(
        self,
        binding: Binding,
        *,
        clock: Callable[[], float] = time.monotonic,
        regions: Callable[[], list[Region]] = anonymous_memory,
    ) -> None:
        """`regions` returns the address ranges of the process's memory when it is called."""
        self._binding = binding
        self._clock = clock
        self._regions = regions
        #: The pages that the current search has not looked at; None between searches.
        self._pieces: Iterator[Addresses] | None = None
        self._next_pass_s = 0.0
        #: Pages that were found on other nodes and are still to be moved.
        self._astray: Addresses = np.empty(0, np.uint64)
        self._is_refused = False
        #: Pages moved by the current or last search.
        self.num_moved_pages = 0
        #: Pages that the current or last search could not move.
        self.num_stuck_pages = 0

    def search_when_idle(self, idle_s: float) -> float | None:
        """Search one piece if it is due. The engine has been idle for `idle_s` seconds.

        Returns the seconds until the next call is due; None if no further call is needed.
        """
        if self._is_refused or not self._binding.binds_memory:
            return None
        if idle_s < IDLE_S:
            return IDLE_S - idle_s
        now_s = self._clock()
        if self._pieces is None:
            if now_s < self._next_pass_s:
                return self._next_pass_s - now_s
            self._pieces = self._all_pages()
            self.num_moved_pages = self.num_stuck_pages = 0
        try:
            is_over = self._move_pages_until(now_s + PIECE_S)
        except OSError as error:
            logger.info("numa: pages are left where they are: move_pages: %s", error.strerror)
            self._is_refused = error.errno in REFUSALS
            is_over = True  # the nodes may be full, so a later search tries again
            self._astray = self._astray[:0]
            if self._is_refused:
                return None
        if not is_over:
            return PAUSE_S
        self._end_pass()
        return AGAIN_S

    def _move_pages_until(self, end_s: float) -> bool:
        """Find and move pages until `end_s`. Returns whether all memory was searched."""
        assert self._pieces is not None
        while True:
            if len(self._astray):
                self._move()
            else:
                pages = next(self._pieces, None)
                if pages is None:
                    return True
                self._astray = self._outside(pages)
            if self._clock() >= end_s:
                return False

    def _end_pass(self) -> None:
        self._pieces, self._next_pass_s = None, self._clock() + AGAIN_S
        if self.num_moved_pages or self.num_stuck_pages:
            logger.info(
                "numa: %d pages were moved to %s while idle; %d could not be moved",
                self.num_moved_pages,
                self._binding.where,
                self.num_stuck_pages,
            )

    def _all_pages(self) -> Iterator[Addresses]:
        for begin, end in self._regions():
            for first in range(begin, end, ASKED_PAGES * PAGE_BYTES):
                last = min(end, first + ASKED_PAGES * PAGE_BYTES)
                yield np.arange(first, last, PAGE_BYTES, dtype=np.uint64)

    @property
    def _calls(self) -> LinuxCalls:
        return self._binding.calls

    def _outside(self, pages: Addresses) -> Addresses:
        """The entries of `pages` that are present in memory but lie on other nodes."""
        nodes = self._calls.nodes_of(pages)
        return pages[(nodes >= 0) & ~np.isin(nodes, self._binding.part.memory_nodes)]

    def _move(self) -> None:
        pages, self._astray = self._astray[:MOVED_PAGES], self._astray[MOVED_PAGES:]
        own = np.array(self._binding.part.memory_nodes, np.int32)
        # A huge page moves as a whole, so all its addresses get the same target.
        targets = own[(pages // HUGE_PAGE_BYTES % len(own)).astype(np.intp)]
        untried = pages[self._calls.move(pages, targets) == UNTRIED]
        if len(untried):  # the first of these pages could not be moved, which ended the call
            self._astray = np.concatenate([untried[1:], self._astray])
            pages = pages[~np.isin(pages, untried[1:])]
        # Ask again: for a second address in a moved huge page, the call's status is "busy".
        nodes = self._calls.nodes_of(pages)
        is_own = np.isin(nodes, own)
        self.num_moved_pages += int(np.count_nonzero(is_own))
        # A page that was unmapped meanwhile is counted neither as moved nor as stuck.
        self.num_stuck_pages += int(np.count_nonzero((nodes != -errno.ENOENT) & ~is_own))
