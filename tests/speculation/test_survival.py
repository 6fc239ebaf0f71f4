"""How the chances of drafts are learned."""

import pytest

from quire.speculation.survival import LOOKS, Survival


def test_without_outcomes_every_place_has_the_first_chance() -> None:
    assert Survival().estimate("a", 3, 0.5) == (0.5, 0.25, 0.125)
    assert Survival().estimate("a", 0, 0.5) == ()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_estimate_comes_close_to_the_rate(rate: float) -> None:
    survival = Survival()
    for number in range(400):
        is_accepted = (number * 7919) % 1000 < 1000 * rate
        survival.learn("a", 1, int(is_accepted))
    assert survival.estimate("a", 1, 0.5)[0] == pytest.approx(rate, abs=0.12)


def test_drafts_behind_a_rejected_one_tell_nothing() -> None:
    survival = Survival()
    for _ in range(50):
        survival.learn("a", 8, 2)
    first, second, third, fourth = survival.estimate("a", 4, 0.5)
    assert first > 0.95 and second > 0.9 and third < 0.1
    assert fourth == pytest.approx(third**2 / second, rel=0.01)  # as at the place before


def test_chances_never_grow_and_stay_chances() -> None:
    survival = Survival()
    for number in range(300):
        survival.learn("a", 5, number % 6)
        chances = survival.estimate("a", 9, 0.5)
        assert list(chances) == sorted(chances, reverse=True)
        assert all(0 < chance < 1 for chance in chances)


def test_kinds_are_learned_apart() -> None:
    survival = Survival()
    for _ in range(30):
        survival.learn("a", 1, 1)
        survival.learn("b", 1, 0)
    assert survival.estimate("a", 1, 0.5)[0] > 0.9 > 0.1 > survival.estimate("b", 1, 0.5)[0]


def test_a_bad_kind_gets_another_chance() -> None:
    survival = Survival()
    for _ in range(40):
        survival.learn("a", 1, 0)
    before = survival.estimate("a", 1, 0.5)[0]
    for _ in range(6 * LOOKS):
        after = survival.estimate("a", 1, 0.5)[0]
    assert before < 0.05 and after > 0.3
