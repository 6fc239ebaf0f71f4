"""Pins alone; what they do to the order of a pool is in test_block_pool."""

import pytest

from quire.core.memory.block_pool import Pins


def pins_of(*entries: tuple[int, int, float | None]) -> Pins:
    """Pins of (block, priority, until_s), all free in this order."""
    pins = Pins()
    for block, priority, until_s in entries:
        pins.pin(block, priority, until_s)
        pins.add(block)
    return pins


def test_free_ones_are_taken_by_priority_then_as_they_were_freed() -> None:
    pins = pins_of((4, 1, None), (2, 0, None), (7, 1, None), (1, 0, None))
    assert pins.block_ids() == [2, 1, 4, 7]
    assert pins.take(3) == [2, 1, 4]
    assert (list(pins.by_block), pins.num_free) == ([7], 1)


def test_held_ones_are_not_taken() -> None:
    pins = pins_of((4, 1, None), (2, 0, None))
    pins.remove(2)
    assert pins.take(2) == [4]
    pins.add(2)
    assert pins.take(2) == [2]


def test_each_end_is_reported_once_and_in_time() -> None:
    pins = pins_of((0, 0, 3.0), (1, 0, 1.0), (2, 0, None), (3, 0, 2.0))
    assert pins.ended(0.5) == []
    assert pins.ended(2.0) == [1, 3]
    assert pins.ended(2.0) == []
    assert pins.ended(1e9) == [0]


@pytest.mark.parametrize("until_s", [None, 9.0])
def test_end_of_a_removed_pin_is_not_reported(until_s: float | None) -> None:
    pins = pins_of((0, 0, 3.0))
    pins.remove(0)
    pins.unpin(0)
    assert pins.ended(1.0) == []
    pins.pin(0, 5, until_s)
    assert pins.ended(4.0) == []
    assert pins.ended(10.0) == ([] if until_s is None else [0])
