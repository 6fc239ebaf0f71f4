"""The statistics of the timing benchmark: exact values, and samples that it must judge."""

import random
from collections.abc import Callable
from types import ModuleType

import pytest

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def script(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.cache_timing")


def normal(count: int, mean: float, seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [numbers.gauss(mean, 0.001) for _ in range(count)]


def test_the_share_counts_pairs_and_halves_ties(script: ModuleType) -> None:
    assert script.mann_whitney([1, 2], [3, 4])[0] == 1.0
    assert script.mann_whitney([3, 4], [1, 2])[0] == 0.0
    assert script.mann_whitney([1, 3], [2, 3])[0] == pytest.approx(2.5 / 4)
    assert script.mann_whitney([5] * 30, [5] * 30) == (0.5, 1.0)


def test_p_is_that_of_the_normal_approximation(script: ModuleType) -> None:
    """Ranks 1 to 8 and 9 to 16: U is 0, its mean 32, its variance 64 * 17 / 12."""
    share, p = script.mann_whitney(range(1, 9), range(9, 17))
    assert share == 1.0
    assert p == pytest.approx(0.000939, rel=0.01)
    # With ties, ranks 1.5 1.5 3.5 | 3.5 5 6: U is 0.5, its mean 4.5, its variance 4.95.
    assert script.mann_whitney([1, 1, 2], [2, 3, 4])[1] == pytest.approx(0.1157, rel=0.01)


def test_equal_samples_pass_about_as_often_as_they_should(script: ModuleType) -> None:
    ps = [
        script.mann_whitney(normal(40, 0.02, 2 * seed), normal(40, 0.02, 2 * seed + 1))[1]
        for seed in range(200)
    ]
    assert sum(p < 0.01 for p in ps) <= 8
    assert 0.35 < sum(p < 0.5 for p in ps) / len(ps) < 0.65


@pytest.mark.parametrize(
    ("known", "again", "code", "words"),
    [
        (0.020, 0.005, 0, "bob learns nothing; a hit would be seen"),
        (0.018, 0.005, 1, "BOB CAN TELL"),
        (0.020, 0.020, 1, "NOTHING could have been seen"),
    ],
)
def test_the_report_judges(
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    known: float,
    again: float,
    code: int,
    words: str,
) -> None:
    means = {"bob, known to alice": known, "bob, new": 0.020, "alice, again": again}
    times = {kind: normal(100, mean, seed) for seed, (kind, mean) in enumerate(means.items())}
    assert script.report(times) == code
    assert words in capsys.readouterr().out
