"""Tokens that prompts share after their last common block: means over many requests only."""

import random

import pytest

from quire.traces import partial_block_overlap
from quire.traces.partial_block_overlap import PartialBlockOverlap
from quire.traces.prefix_ids import PrefixIds

SIZE = 4


def test_mean_is_published_in_whole_tokens_for_enough_prompts() -> None:
    ids, chance = PrefixIds(SIZE), random.Random(1)
    for number in range(200):  # 7 tokens in common: a block, and 3
        ids.add(number, "", [1, 2, 3, 4, 5, 6, 7, *chance.choices(range(10, 10**6), k=5)], [[]])
        is_enough = number - 1 >= partial_block_overlap.LEAST_REQUESTS
        assert ids.overlap.shared_tail_tokens == (3 if is_enough else None)
    assert ids.overlap.continued_share is None


def test_prompts_that_continue_a_request_do_not_enter_the_mean() -> None:
    ids, number = PrefixIds(SIZE), 0

    def add(prompt: list[int], answer: list[int]) -> int | None:
        nonlocal number
        number += 1
        return ids.add(number - 1, "", prompt, [answer]).parent

    for talk in range(64):
        first = [talk, 2, 3, 4, 5]
        assert add(first, [6, 7]) is None  # no block is filled, so it is nobody's parent
        assert add([*first, 6, 7, 8], [9] * 4) is None
    assert (ids.overlap.continued_share, ids.overlap.shared_tail_tokens) == (1.0, 0)
    for talk in range(64):
        add([talk, 2, 3, 4, 5, 6, 9], [])  # goes on with another answer
        add([talk, 2, 3, 4, 5, 6, 8], [])
    assert (ids.overlap.continued_share, ids.overlap.shared_tail_tokens) == (0.33, 1)
    assert add([0, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 0], []) is not None  # the file tells it
    assert ids.overlap.continued_share == 0.33


def test_mean_does_not_reveal_a_single_prompt() -> None:
    """It moves it by a step of the rounding at most, and most don't move it at all."""

    def told(lengths: list[int]) -> int | None:
        overlap = PartialBlockOverlap(64)
        for number, length in enumerate(lengths):
            for rest in (range(70), [*range(length), *range(1000, 1070)]):
                overlap.compare(str(number).encode(), rest, is_answer=False)
        return overlap.shared_tail_tokens

    chance = random.Random(7)
    assert told([20] * (partial_block_overlap.LEAST_REQUESTS - 1)) is None
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
def test_mean_never_exceeds_the_possible_overlap(number: int) -> None:
    """A trace with more is refused."""
    overlap = PartialBlockOverlap(64)
    overlap.record_end(b"end", [1], is_answer=False)
    for _ in range(number + 1):
        overlap.compare(b"same", range(63), is_answer=False)
        overlap.compare(b"end", [1, 2], is_answer=False)
    assert (overlap.shared_tail_tokens, overlap.continued_share) == (63, 1.0)


def test_number_of_stored_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_block_overlap, "MAX_STORED", 5)
    ids = PrefixIds(SIZE)
    for number in range(20):
        ids.add(number, str(number), [1, 2, 3], [[]])
    assert len(ids.overlap._heads) == len(ids.overlap._ends) == 5
    overlap = PartialBlockOverlap(SIZE)
    overlap.record_end(b"x", [1], is_answer=False)
    overlap.record_end(b"x", [1], is_answer=True)
    assert not overlap._ends
