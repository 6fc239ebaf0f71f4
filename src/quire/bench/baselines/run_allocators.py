"""Allocators of runs of adjacent blocks, as used before paging.

`FirstFit` joins adjacent holes (free runs); `Buddy` is the binary buddy system (Knuth, TAOCP vol.
1, section 2.5). Both suffer from external fragmentation: a run may fit in no hole although enough
blocks are free. Used only by `contiguous`.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from quire.errors import ConfigurationError


class RunAllocator(ABC):
    """Hands out runs of adjacent blocks, as ranges of block ids.

    Invariant: runs and holes are disjoint, and together contain all blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, but must be at least 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._taken: set[range] = set()

    def take(self, count: int) -> range | None:
        """Take a run of `granted(count)` blocks. Returns None if no hole is large enough.

        `count` must be at least 1.
        """
        run = self._cut(count)
        if run is not None:
            self.num_free -= len(run)
            self._taken.add(run)
        return run

    def give_back(self, run: range) -> None:
        """Free a run, exactly as `take` returned it."""
        assert run in self._taken, f"{run} is not handed out"
        self._taken.remove(run)
        self.num_free += len(run)
        self._join(run)

    @abstractmethod
    def granted(self, count: int) -> int:
        """The number of blocks that `take(count)` takes: count, or more if it is rounded up."""

    @abstractmethod
    def fits(self, count: int) -> bool:
        """Whether a run of `count` blocks fits in a hole now."""

    @abstractmethod
    def holes(self) -> list[range]:
        """The allocator's free runs in the order of their addresses."""

    @abstractmethod
    def _cut(self, count: int) -> range | None:
        """Take a run out of the holes. Returns None if no hole fits."""

    @abstractmethod
    def _join(self, run: range) -> None:
        """Turn a run into a hole, joined with adjacent holes where the allocator allows it."""


class FirstFit(RunAllocator):
    """Cuts each run from the first hole that is long enough, and joins adjacent holes.

    Invariant: holes are sorted and no two are adjacent. Taking a run costs O(holes). Giving it back
    costs O(log holes) and an insertion into a list.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._starts = [0]
        self._stops = [num_blocks]

    def granted(self, count: int) -> int:
        return count

    def fits(self, count: int) -> bool:
        return self._find(count) is not None

    def _cut(self, count: int) -> range | None:
        index = self._find(count)
        if index is None:
            return None
        run = range(self._starts[index], self._starts[index] + count)
        if run.stop == self._stops[index]:
            del self._starts[index], self._stops[index]
        else:
            self._starts[index] = run.stop
        return run

    def _join(self, run: range) -> None:
        index = bisect_left(self._starts, run.start)
        is_after_hole = index > 0 and self._stops[index - 1] == run.start
        is_before_hole = index < len(self._starts) and self._starts[index] == run.stop
        if is_after_hole and is_before_hole:
            self._stops[index - 1] = self._stops[index]
            del self._starts[index], self._stops[index]
        elif is_after_hole:
            self._stops[index - 1] = run.stop
        elif is_before_hole:
            self._starts[index] = run.start
        else:
            self._starts.insert(index, run.start)
            self._stops.insert(index, run.stop)

    def holes(self) -> list[range]:
        return [range(*ends) for ends in zip(self._starts, self._stops, strict=True)]

    def _find(self, count: int) -> int | None:
        sizes = zip(self._starts, self._stops, strict=True)
        return next((at for at, (start, stop) in enumerate(sizes) if stop - start >= count), None)


class Buddy(RunAllocator):
    """Runs have a power of two blocks, aligned to their length. A freed run joins its free buddy.

    If num_blocks is not a power of two, it is split into powers of two, longest first. So the
    longest run is the largest power of two that is at most num_blocks. Taking a run halves free
    runs at most log2(num_blocks) times. Freeing it joins runs at most that number of times.

    Invariant: no two free runs of equal length are the two halves of one aligned run.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        #: For each order, the first blocks of all free runs of 2**order blocks, ascending.
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def granted(self, count: int) -> int:
        return next_power_of_two(count)

    def fits(self, count: int) -> bool:
        return any(self._free[_order(count) :])

    def _cut(self, count: int) -> range | None:
        wanted = _order(count)
        order = next((at for at in range(wanted, len(self._free)) if self._free[at]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], start + (1 << order))
        return range(start, start + (1 << wanted))

    def _join(self, run: range) -> None:
        start, order = run.start, _order(len(run))
        while True:
            other_half = start ^ (1 << order)
            free = self._free[order]
            index = bisect_left(free, other_half)
            if index == len(free) or free[index] != other_half:
                insort(free, start)
                return
            del free[index]
            start, order = min(start, other_half), order + 1

    def holes(self) -> list[range]:
        runs = [
            range(start, start + (1 << order))
            for order, starts in enumerate(self._free)
            for start in starts
        ]
        return sorted(runs, key=lambda run: run.start)


PLACEMENTS: dict[str, type[RunAllocator]] = {"buddy": Buddy, "first_fit": FirstFit}


def find_placement(name: str) -> type[RunAllocator]:
    """The allocator with this name. Raises ConfigurationError, which lists the known names."""
    if name not in PLACEMENTS:
        known = ", ".join(sorted(PLACEMENTS))
        raise ConfigurationError(f"placement is {name!r}, but must be one of {known}")
    return PLACEMENTS[name]


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`. `count` must be at least 1."""
    return 1 << _order(count)


def _order(count: int) -> int:
    return (count - 1).bit_length()
