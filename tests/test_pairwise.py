"""Rows of values in which every two meet, and the tests that they are given to."""

import math
from itertools import combinations

import pytest
from tests.pairwise import covering_rows, pairwise


@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (4, 2, 8, 3), (4, 7, 2, 2), (2,) * 9])
def test_every_two_values_stand_together_in_a_row(counts: tuple[int, ...]) -> None:
    rows = covering_rows(counts)
    for a, b in combinations(range(len(counts)), 2):
        assert {(row[a], row[b]) for row in rows} == {
            (i, j) for i in range(counts[a]) for j in range(counts[b])
        }
    assert len(set(rows)) == len(rows) <= math.prod(counts)
    assert rows == covering_rows(counts)


def test_rows_are_hardly_more_than_the_two_longest_parameters_need() -> None:
    assert len(covering_rows((4, 2, 8, 3))) <= 36  # 32 at least, 192 in the product
    assert len(covering_rows((2,) * 9)) <= 10  # 512 in the product


@pytest.fixture(params=["never used: the mark says what it is"])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pairwise(number=["3", "5"])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)], ids=lambda pair: f"pair {pair}")
@pytest.mark.parametrize("letter", ["x", "y"], ids=["first", "second"])
def test_a_fixture_and_marks_of_any_form_become_rows(
    number: int, letter: str, a: int, b: int, request: pytest.FixtureRequest
) -> None:
    assert number in (3, 5) and (a, b) in ((1, 2), (3, 4))
    label = {"x": "first", "y": "second"}[letter]
    assert request.node.name.endswith(f"[{number}-{label}-pair ({a}, {b})]")


def test_the_product_of_eight_became_four_rows() -> None:
    (mark,) = test_a_fixture_and_marks_of_any_form_become_rows.pytestmark  # type: ignore[attr-defined]
    assert len(mark.args[1]) == 4
