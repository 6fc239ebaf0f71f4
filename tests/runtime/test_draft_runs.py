"""Tests of where a row's run of drafts ends."""

import pytest

from quire.core.draft_stops import GRADE_BOUNDS, TYPICAL_PROBABILITIES, DraftStop, grade_of
from quire.core.step import Drafted, DraftOrder
from quire.runtime.draft_runs import DraftRuns
from quire.sampling.host.sampler import NO_TOKEN

NO_STOP = DraftStop()


def make(*drafts: tuple[int, float], num_drafts: int = 9, stop: DraftStop = NO_STOP) -> DraftRuns:
    """The runs of an order, of which each but the last must go on."""
    runs = DraftRuns(DraftOrder(0, num_drafts, 1, stop))
    for draft in drafts:
        assert runs.goes_on
        runs.add(*draft)
    return runs


def test_a_row_gets_at_most_the_drafts_that_were_ordered() -> None:
    assert not make(num_drafts=0).goes_on
    assert make((5, 0.9), num_drafts=2).goes_on
    runs = make((5, 0.9), (6, 0.8), num_drafts=2)
    assert not runs.goes_on
    assert runs.drafted(7) == Drafted((5, 6), 7, (0.9, 0.8))


def test_nothing_follows_a_token_that_ends_the_sequence_or_unusable_logits() -> None:
    stop = DraftStop(end_token_ids=frozenset({2}))
    ended = make((5, 0.9), (2, 0.99), stop=stop)
    assert not ended.goes_on and ended.drafted(1).token_ids == (5, 2)
    broken = make((5, 0.9), (NO_TOKEN, 0.5))
    assert not broken.goes_on and broken.drafted(1) == Drafted((5,), 1, (0.9,))


def test_a_draft_is_made_only_if_it_is_likely_enough_to_be_accepted() -> None:
    stop = DraftStop(least_chance=0.5)
    assert make((5, 0.99), (6, 0.99), stop=stop).goes_on
    unsure = make((5, 0.99), (6, 0.6), stop=stop)  # an accepted third draft has a chance of 0.48
    assert not unsure.goes_on and unsure.drafted(1).token_ids == (5, 6)


@pytest.mark.parametrize("grade", range(len(TYPICAL_PROBABILITIES)))
def test_each_grade_has_a_typical_probability(grade: int) -> None:
    assert grade_of(TYPICAL_PROBABILITIES[grade]) == grade
    assert grade_of((0.0, *GRADE_BOUNDS)[grade]) == grade
