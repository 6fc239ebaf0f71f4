"""Tests that run alone, and long ones, are the first of a run in several processes."""

from types import SimpleNamespace
from typing import Any

from tests.collecting import is_first, put_first


def test_tests_that_run_alone_are_the_first_and_then_the_long_ones_in_their_own_order() -> None:
    marks: dict[str, dict[str, int]] = {
        **{"a": {}, "b": {"long": 1}, "c": {"alone": 1}},
        **{"d": {"other": 1}, "e": {"alone": 1}, "f": {"long": 1}},
    }
    items: list[Any] = [
        SimpleNamespace(name=name, get_closest_marker=found.get) for name, found in marks.items()
    ]
    put_first(items)
    assert [item.name for item in items] == ["c", "e", "b", "f", "a", "d"]
    assert [is_first(item) for item in items] == [True] * 4 + [False] * 2
