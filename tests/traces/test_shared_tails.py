"""What prompts share behind whole blocks: two means, and only over many."""

import random

import pytest

from quire.traces import shared_tails
from quire.traces.prefix_ids import PrefixIds
from quire.traces.shared_tails import SharedTails

SIZE = 4


def test_the_mean_is_in_whole_tokens_and_over_many() -> None:
    ids, chance = PrefixIds(SIZE), random.Random(1)
    for number in range(200):  # 7 tokens in common: a block, and 3
        ids.add(number, "", [1, 2, 3, 4, 5, 6, 7, *chance.choices(range(10, 10**6), k=5)], [[]])
        is_enough = number - 1 >= shared_tails.LEAST_REQUESTS
        assert ids.tails.shared_tail_tokens == (3 if is_enough else None)
    assert ids.tails.continued_share is None


def test_turns_behind_short_answers_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tails, "LEAST_REQUESTS", 1)
    ids = PrefixIds(SIZE)
    ids.add(0, "", [1, 2, 3, 4, 5], [[6, 7]])  # no block is filled, so it is nobody's parent
    found = ids.add(1, "", [1, 2, 3, 4, 5, 6, 7, 8], [[9] * 4])
    assert found.parent is None
    assert (ids.tails.continued_share, ids.tails.shared_tail_tokens) == (1.0, None)
    ids.add(2, "", [1, 2, 3, 4, 5, 6, 9], [[]])  # goes on with another answer
    ids.add(3, "", [1, 2, 3, 4, 5, 6, 8], [[]])
    assert (ids.tails.continued_share, ids.tails.shared_tail_tokens) == (0.33, 2)
    ids.add(4, "", [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 0], [[]])  # the file tells its parent
    assert ids.tails.continued_share == 0.33


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tails, "MAX_KEPT", 5)
    ids = PrefixIds(SIZE)
    for number in range(20):
        ids.add(number, str(number), [1, 2, 3], [[]])
    assert len(ids.tails._heads) == len(ids.tails._ends) == 5
    tails = SharedTails(SIZE)
    tails.note_end(b"x", [1], is_answer=False)
    tails.note_end(b"x", [1], is_answer=True)
    assert not tails._ends
