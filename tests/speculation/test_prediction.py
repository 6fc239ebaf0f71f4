"""The cursor that follows an answer through the tokens that its client predicted."""

from hypothesis import given
from hypothesis import strategies as st
from tests.speculation.sequences import make_sequence

from quire.speculation.prediction import MAX_PLACES, PredictionCursor, make_proposer
from quire.speculation.speculation_options import SpeculationOptions


def followed(prediction: list[int], answer: list[int]) -> PredictionCursor:
    cursor = PredictionCursor(prediction)
    cursor.follow(answer)
    return cursor


def test_an_equal_answer_is_followed_to_the_end() -> None:
    cursor = followed([5, 6, 7, 8], [5, 6])
    assert cursor.is_following and cursor.ahead(9) == [7, 8]
    cursor.follow([7, 8])
    assert (cursor.ahead(9), cursor.num_accepted, cursor.num_rejected) == ([], 4, 0)
    cursor.follow([9])
    assert (cursor.num_accepted, cursor.is_following) == (4, False)


def test_a_replaced_a_left_out_and_an_inserted_part_are_found_again() -> None:
    prediction = list(range(10, 30))
    for answer in (
        [10, 11, 99, 13, 14],  # 99 in place of 12
        [10, 11, 13, 14],  # without 12
        [10, 11, 98, 99, 12, 13, 14],
    ):
        cursor = followed(prediction, answer)
        assert cursor.is_following and cursor.ahead(3) == [15, 16, 17], answer
        assert cursor.num_accepted < len(answer)


def test_of_equal_places_the_next_one_is_taken() -> None:
    prediction = [1, 2, 3, 7, 7, 1, 2, 4, 7, 1, 2, 5]
    cursor = followed(prediction, [1, 2, 3, 7, 7])
    cursor.follow([9, 1, 2])
    assert cursor.ahead(1) == [4]
    cursor.follow([9, 1, 2])
    assert cursor.ahead(1) == [5]
    cursor.follow([9, 1, 2])
    assert cursor.ahead(1) == [5]  # none is behind, so the last one before


def test_an_answer_of_other_tokens_is_not_followed() -> None:
    cursor = followed([1, 2, 3], [7, 8, 9])
    assert not cursor.is_following and (cursor.num_accepted, cursor.num_rejected) == (0, 3)


@given(places=st.sets(st.integers(0, 400)), place=st.integers(0, 400))
def test_the_nearest_places_behind_come_first(places: set[int], place: int) -> None:
    cursor = PredictionCursor([0] * 400)
    cursor.place = place
    ordered = sorted(places, key=lambda each: (each < place, abs(each - place)))
    assert cursor._nearest(sorted(places)) == ordered[:MAX_PLACES]


@given(
    prediction=st.lists(st.integers(0, 3), max_size=30),
    answer=st.lists(st.integers(0, 3), max_size=60),
    cut=st.integers(0, 60),
)
def test_counts_depend_on_the_tokens_and_not_on_how_they_come(
    prediction: list[int], answer: list[int], cut: int
) -> None:
    whole, parts = PredictionCursor(prediction), PredictionCursor(prediction)
    whole.follow(answer)
    parts.follow(answer[:cut])
    parts.follow(answer[cut:])
    assert (whole.num_accepted, whole.place) == (parts.num_accepted, parts.place)
    assert 0 <= whole.num_accepted <= min(len(prediction), len(answer))
    assert whole.num_accepted + whole.num_rejected == len(prediction)


def test_the_proposer_follows_each_sequence_by_itself() -> None:
    proposer = make_proposer(SpeculationOptions())
    first = make_sequence([1, 2], [10], prediction=(10, 11, 12, 13))
    second = make_sequence([1, 2], [10, 11], prediction=(10, 11, 12, 13))
    without = make_sequence([1, 2], [10])
    assert proposer.propose(without, 4) is None
    guess = proposer.propose(first, 2)
    assert guess is not None and guess.token_ids == (11, 12)
    guess = proposer.propose(second, 4)
    assert guess is not None and guess.token_ids == (12, 13)
    first.append(99)
    assert proposer.propose(first, 4) is None
    proposer.end(first)
    proposer.end(second)
    assert not proposer._cursors
