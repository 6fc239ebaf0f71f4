"""Runs of blocks: disjoint, inside the line, and whole again once all were given back."""

import random
from itertools import pairwise

import pytest

from quire.bench.baselines.run_allocators import (
    PLACEMENTS,
    Buddy,
    FirstFit,
    RunAllocator,
    find_placement,
    next_power_of_two,
)
from quire.errors import ConfigurationError


def taken(allocator: RunAllocator, count: int) -> range:
    run = allocator.take(count)
    assert run is not None
    return run


def check(allocator: RunAllocator, runs: list[range]) -> None:
    """Runs and holes cover the line, each block once."""
    pieces = sorted([*runs, *allocator.holes()], key=lambda run: run.start)
    assert pieces[0].start == 0 and pieces[-1].stop == allocator.num_blocks
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    assert allocator.num_free == sum(map(len, allocator.holes()))


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("num_blocks", [1, 64, 100, 981])
def test_any_order_of_taking_and_giving_back_keeps_the_line_whole(
    name: str, num_blocks: int
) -> None:
    chance = random.Random(num_blocks)
    allocator = find_placement(name)(num_blocks)
    whole = allocator.holes()
    runs: list[range] = []
    for _ in range(600):
        if runs and chance.random() < 0.45:
            allocator.give_back(runs.pop(chance.randrange(len(runs))))
        else:
            count = chance.randint(1, max(1, num_blocks // 5))
            fits, before = allocator.fits(count), allocator.holes()
            run = allocator.take(count)
            assert fits == (run is not None)
            if run is None:
                assert allocator.holes() == before
                assert all(len(hole) < allocator.granted(count) for hole in before)
            else:
                assert len(run) == allocator.granted(count) >= count
                runs.append(run)
        check(allocator, runs)
    for run in runs:
        allocator.give_back(run)
    assert allocator.holes() == whole


def test_first_fit_takes_the_first_hole_that_is_long_enough() -> None:
    allocator = FirstFit(20)
    runs = [taken(allocator, count) for count in (3, 4, 5, 8)]
    assert runs == [range(0, 3), range(3, 7), range(7, 12), range(12, 20)]
    allocator.give_back(runs[0])
    allocator.give_back(runs[2])
    assert allocator.holes() == [range(0, 3), range(7, 12)]
    assert taken(allocator, 4) == range(7, 11)
    assert taken(allocator, 1) == range(0, 1)
    assert allocator.take(4) is None and allocator.num_free == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_adjacent_holes_become_one(order: tuple[int, ...]) -> None:
    allocator = FirstFit(9)
    runs = [taken(allocator, 3) for _ in range(3)]
    for index in order:
        allocator.give_back(runs[index])
    assert allocator.holes() == [range(0, 9)]


def test_enough_may_be_free_and_still_no_hole_fit() -> None:
    allocator = FirstFit(12)
    runs = [taken(allocator, 3) for _ in range(4)]
    allocator.give_back(runs[0])
    allocator.give_back(runs[2])
    assert allocator.num_free == 6 and not allocator.fits(4)


def test_buddy_rounds_up_and_halves_what_it_needs() -> None:
    allocator = Buddy(16)
    assert taken(allocator, 3) == range(0, 4)
    assert allocator.holes() == [range(4, 8), range(8, 16)]
    assert taken(allocator, 1) == range(4, 5)
    assert allocator.holes() == [range(5, 6), range(6, 8), range(8, 16)]
    assert taken(allocator, 5) == range(8, 16)
    assert allocator.take(3) is None and allocator.num_free == 3


def test_only_halves_of_one_run_join() -> None:
    allocator = Buddy(8)
    runs = [taken(allocator, 2) for _ in range(4)]
    allocator.give_back(runs[1])
    allocator.give_back(runs[2])
    assert allocator.holes() == [range(2, 4), range(4, 6)] and not allocator.fits(4)
    allocator.give_back(runs[0])
    assert allocator.holes() == [range(0, 4), range(4, 6)]
    allocator.give_back(runs[3])
    assert allocator.holes() == [range(0, 8)]


def test_buddy_covers_a_line_of_any_length() -> None:
    allocator = Buddy(13)
    assert allocator.holes() == [range(0, 8), range(8, 12), range(12, 13)]
    assert allocator.fits(8) and not allocator.fits(9)
    assert taken(allocator, 1) == range(12, 13)  # the shortest run that will do


@pytest.mark.parametrize("name", PLACEMENTS)
def test_giving_back_twice_is_a_bug(name: str) -> None:
    allocator = find_placement(name)(8)
    run = taken(allocator, 2)
    taken(allocator, 2)
    allocator.give_back(run)
    with pytest.raises(AssertionError):
        allocator.give_back(run)


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (25, 32), (33, 64)])
def test_next_power_of_two(count: int, power: int) -> None:
    assert next_power_of_two(count) == power


def test_an_unknown_placement_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'best_fit', but must be one of buddy, first_fit"):
        find_placement("best_fit")


def test_a_line_has_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        FirstFit(0)
