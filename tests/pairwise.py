"""Thins a product of parameters to rows in which every two of their values still meet.

    @pairwise(kernels=NATIVE_KERNELS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [1, 16, 17])
    def test_...(kernels, dtype, size)

For tests whose parameters go different ways in the code one or two at a time: what only three
values together can break, rows drawn like this may miss.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])
Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two values, each as (parameter, index of its value); the lower parameter comes first."""


def covering_rows(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one index below each of `counts`, so that any two indices stand together in a row.

    Each row starts with the first missing pair; each further parameter takes the value with the
    most missing pairs, among equals the one used least. The same counts give the same rows.
    """
    missing: dict[Pair, None] = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in combinations(range(len(counts)), 2)
        for i in range(counts[a])
        for j in range(counts[b])
    )
    used = [[0] * count for count in counts]
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for parameter in range(len(counts)):
            if parameter not in row:
                row[parameter] = max(
                    range(counts[parameter]),
                    key=lambda i: (
                        sum(_pair(other, (parameter, i)) in missing for other in row.items()),
                        -used[parameter][i],
                    ),
                )
        for parameter, i in row.items():
            used[parameter][i] += 1
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(row[parameter] for parameter in range(len(counts))))
    return rows


def pairwise(**fixtures: Sequence[Any]) -> Callable[[Test], Test]:
    """Replaces a test's `parametrize` marks, which stand below, by one with covering rows.

    fixtures: parametrised fixtures that join the other parameters, with their values.
    """

    def thin(test: Test) -> Test:
        marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
        products = [mark for mark in marks if mark.name == "parametrize"]
        names, values, labels = list(fixtures), [], []
        for of_fixture in fixtures.values():
            values.append([(value,) for value in of_fixture])
            labels.append([str(value) for value in of_fixture])
        for mark in products:
            of_mark, given = mark.args
            of_mark = [of_mark] if isinstance(of_mark, str) else list(of_mark)
            names += of_mark
            values.append([(value,) if len(of_mark) == 1 else tuple(value) for value in given])
            labels.append(_labels(given, mark.kwargs.get("ids")))
        rows = [
            pytest.param(
                *(value for each, i in zip(values, row, strict=True) for value in each[i]),
                id="-".join(each[i] for each, i in zip(labels, row, strict=True)),
            )
            for row in covering_rows([len(each) for each in values])
        ]
        test.pytestmark = [mark for mark in marks if mark.name != "parametrize"]  # type: ignore[attr-defined]
        return pytest.mark.parametrize(names, rows, indirect=list(fixtures))(test)

    return thin


def _pair(one: tuple[int, int], other: tuple[int, int]) -> Pair:
    return (one, other) if one < other else (other, one)


def _labels(values: Iterable[Any], ids: Callable[[Any], str] | Iterable[str] | None) -> list[str]:
    if ids is None:
        ids = str
    return [str(label) for label in (map(ids, values) if callable(ids) else ids)]
