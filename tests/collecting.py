"""Which tests begin first in a run of several processes."""

import pytest

FIRST = ("alone", "long")
"""The marks of tests that begin first, in this order."""


def is_first(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in FIRST)


def put_first(items: list[pytest.Item]) -> None:
    """Put the tests that run alone, then the long ones, before all others.

    All other processes then wait only once for those that run alone, at a time when their tests are
    short: a test that runs alone waits for the tests that other processes have begun. A long test
    that began last would leave processors idle.
    """

    def place(item: pytest.Item) -> int:
        marks = (at for at, mark in enumerate(FIRST) if item.get_closest_marker(mark))
        return next(marks, len(FIRST))

    items.sort(key=place)
