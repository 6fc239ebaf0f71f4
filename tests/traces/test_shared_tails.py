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


def test_turns_behind_short_answers_are_counted_apart() -> None:
    ids, number = PrefixIds(SIZE), 0

    def add(prompt: list[int], answer: list[int]) -> int | None:
        nonlocal number
        number += 1
        return ids.add(number - 1, "", prompt, [answer]).parent

    for talk in range(64):
        first = [talk, 2, 3, 4, 5]
        assert add(first, [6, 7]) is None  # no block is filled, so it is nobody's parent
        assert add([*first, 6, 7, 8], [9] * 4) is None
    assert (ids.tails.continued_share, ids.tails.shared_tail_tokens) == (1.0, 0)
    for talk in range(64):
        add([talk, 2, 3, 4, 5, 6, 9], [])  # goes on with another answer
        add([talk, 2, 3, 4, 5, 6, 8], [])
    assert (ids.tails.continued_share, ids.tails.shared_tail_tokens) == (0.33, 1)
    assert add([0, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 0], []) is not None  # the file tells it
    assert ids.tails.continued_share == 0.33


def test_no_one_prompt_is_seen_in_a_mean() -> None:
    """It moves it by a step of the rounding at most, and most don't move it at all."""

    def told(lengths: list[int]) -> int | None:
        tails = SharedTails(64)
        for number, length in enumerate(lengths):
            for rest in (range(70), [*range(length), *range(1000, 1070)]):
                tails.compare(str(number).encode(), rest, is_answer=False)
        return tails.shared_tail_tokens

    chance = random.Random(7)
    assert told([20] * (shared_tails.LEAST_REQUESTS - 1)) is None
    for number in (32, 50, 100, 300):
        changed, step = 0, 2 * 63 / (1 << number.bit_length() - 1)
        for _ in range(20):
            lengths = [chance.randrange(64) for _ in range(number)]
            one, other = told(lengths), told([*lengths[1:], 63 - lengths[0]])
            assert one is not None and other is not None
            assert abs(one - sum(lengths) / number) <= step / 2 + 0.5
            assert abs(one - other) <= step + 1
            changed += one != other
        assert changed <= 8, (number, changed)


@pytest.mark.parametrize("number", range(32, 200))
def test_the_most_that_prompts_can_share_is_never_exceeded(number: int) -> None:
    """A trace with more is refused."""
    tails = SharedTails(64)
    tails.note_end(b"end", [1], is_answer=False)
    for _ in range(number + 1):
        tails.compare(b"same", range(63), is_answer=False)
        tails.compare(b"end", [1, 2], is_answer=False)
    assert (tails.shared_tail_tokens, tails.continued_share) == (63, 1.0)


def test_kept_tails_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tails, "MAX_KEPT", 5)
    ids = PrefixIds(SIZE)
    for number in range(20):
        ids.add(number, str(number), [1, 2, 3], [[]])
    assert len(ids.tails._heads) == len(ids.tails._ends) == 5
    tails = SharedTails(SIZE)
    tails.note_end(b"x", [1], is_answer=False)
    tails.note_end(b"x", [1], is_answer=True)
    assert not tails._ends
