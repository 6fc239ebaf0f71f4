"""The usage of a call with a prediction, however its choices' tokens come."""

from hypothesis import given
from hypothesis import strategies as st

from quire.engine_client.results import Delta
from quire.server.generation.prediction_counts import PredictionCounts
from quire.speculation.prediction import PredictionCursor


def follow(counts: PredictionCounts, choice: int, token_ids: list[int], end: str | None) -> int:
    """Returns the number of pauses."""
    return len(list(counts.follow(choice, Delta(token_ids=token_ids, finish_reason=end))))


def test_running_choices_count_what_they_have_and_ended_ones_what_they_lack() -> None:
    counts = PredictionCounts((5, 6, 7, 8))
    follow(counts, 0, [5, 6], None)
    follow(counts, 1, [5], None)
    assert (counts.num_accepted, counts.num_rejected) == (3, 0)
    follow(counts, 0, [9], "stop")
    assert (counts.num_accepted, counts.num_rejected) == (3, 2)
    follow(counts, 1, [], "length")
    assert (counts.num_accepted, counts.num_rejected) == (3, 5)


def test_a_long_answer_is_counted_in_pieces() -> None:
    counts = PredictionCounts(tuple(range(1000)))
    assert follow(counts, 0, list(range(600)), "length") == 3
    assert (counts.num_accepted, counts.num_rejected) == (600, 400)


@given(
    prediction=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    answers=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=3),
    data=st.data(),
)
def test_counts_are_those_of_the_answers_whichever_way_they_come(
    prediction: list[int], answers: list[list[int]], data: st.DataObject
) -> None:
    counts = PredictionCounts(prediction)
    num_accepted = 0
    for choice, answer in enumerate(answers):
        cut = data.draw(st.integers(0, len(answer)))
        follow(counts, choice, answer[:cut], None)
        follow(counts, choice, answer[cut:], "stop")
        cursor = PredictionCursor(prediction)
        cursor.follow(answer)
        num_accepted += cursor.num_accepted
    assert counts.num_accepted == num_accepted
    assert counts.num_accepted + counts.num_rejected == len(answers) * len(prediction)
