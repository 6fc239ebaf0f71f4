"""Sums of counts of drafts."""

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.draft_totals import DraftTotals
from quire.core.scheduling.proposals import DraftCounts

ROWS = st.lists(
    st.tuples(st.sampled_from(["ngram", "history"]), st.integers(1, 6), st.integers(0, 6)),
    max_size=20,
)


def counted(rows: list[tuple[str, int, int]]) -> dict[str, Any]:
    """As `Drafting.as_dict` has them, of (proposer, verified, accepted) of each row."""
    counts: dict[str, DraftCounts] = {}
    for proposer, num_verified, num_accepted in rows:
        found = counts.setdefault(proposer, DraftCounts())
        found.add(num_verified, min(num_accepted, num_verified))
    return {
        "by_proposer": {name: asdict(found) for name, found in counts.items()},
        "saved_s": 0.0,
    }


def test_without_drafts_all_is_zero() -> None:
    for drafts in ({}, counted([])):
        totals = DraftTotals.of(drafts)
        assert totals == DraftTotals()
        assert (totals.num_rows, totals.num_verified, totals.num_accepted) == (0, 0, 0)
        assert (totals.accepted_share, totals.tokens_a_step) == (0.0, 1.0)


def test_proposers_are_added_up_by_position() -> None:
    totals = DraftTotals.of(counted([("ngram", 3, 1), ("history", 5, 5), ("ngram", 1, 0)]))
    assert totals == DraftTotals((3, 2, 2, 1, 1), (2, 1, 1, 1, 1))
    assert (totals.num_rows, totals.num_verified, totals.num_accepted) == (3, 9, 6)
    assert (totals.accepted_share, totals.tokens_a_step) == (6 / 9, 3.0)


@given(rows=ROWS, cut=st.integers(0, 20))
def test_the_later_part_is_what_came_since(rows: list[tuple[str, int, int]], cut: int) -> None:
    before, after = DraftTotals.of(counted(rows[:cut])), DraftTotals.of(counted(rows))
    since, part = after.since(before), DraftTotals.of(counted(rows[cut:]))
    assert since.num_rows == part.num_rows == len(rows[cut:])
    assert (since.num_verified, since.num_accepted) == (part.num_verified, part.num_accepted)
    assert since.tokens_a_step == part.tokens_a_step
