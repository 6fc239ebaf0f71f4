"""Drafts of the n-gram proposer: tables, and a comparison with a search by brute force."""

import random
from collections.abc import Sequence as Tokens

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence
from quire.speculation.ngram import (
    LONGEST_MATCH,
    MAX_CANDIDATES,
    NgramIndex,
    graded,
    make_proposer,
)
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions


def tokens_of(guess: Guess | None) -> list[int]:
    return [] if guess is None else list(guess.token_ids)


def proposed(token_ids: Tokens[int], most: int, least_match: int = 2) -> list[int]:
    return tokens_of(NgramIndex(least_match).propose(token_ids, most))


@pytest.mark.parametrize(
    ("token_ids", "most", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3, 4], 4, []),
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 1, 2], 0, []),
        # The source runs into the end, and goes on with the drafts.
        ([1, 2, 3, 4, 1, 2], 7, [3, 4, 1, 2, 3, 4, 1]),
        ([7, 7, 7], 3, [7, 7, 7]),
        # The longer match wins over the newer one, the newer one over an equal one.
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [5]),
        ([1, 2, 5, 8, 1, 2, 6, 3, 1, 2], 1, [6]),
        # One token in common is too little.
        ([1, 2, 3, 5, 2], 2, []),
    ],
)
def test_drafts_follow_an_earlier_occurrence(
    token_ids: list[int], most: int, expected: list[int]
) -> None:
    assert proposed(token_ids, most) == expected


def test_a_match_of_one_token_is_enough_if_asked_for() -> None:
    assert proposed([1, 2, 3, 5, 2], 2, least_match=1) == [3, 5]


def longest_by_brute_force(token_ids: list[int], least_match: int) -> int:
    """The length of the longest match among the newest MAX_CANDIDATES occurrences."""
    last = len(token_ids) - 1
    lengths = []
    for end in range(last - 1, least_match - 2, -1):
        length = 0
        while length <= end and token_ids[end - length] == token_ids[last - length]:
            length += 1
        if length >= least_match:
            lengths.append(min(length, LONGEST_MATCH))
    return max(lengths[:MAX_CANDIDATES], default=0)


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=120),
    least_match=st.integers(1, 4),
    parts=st.lists(st.integers(1, 30), max_size=8),
)
def test_the_longest_match_is_found_however_the_tokens_come(
    token_ids: list[int], least_match: int, parts: list[int]
) -> None:
    index = NgramIndex(least_match)
    end = 0
    for part in parts:  # an index that saw the tokens in parts proposes as a new one does
        end = min(end + part, len(token_ids))
        drafts = tokens_of(index.propose(token_ids[:end], 5))
        assert drafts == proposed(token_ids[:end], 5, least_match)
    drafts = tokens_of(index.propose(token_ids, 5))
    length = longest_by_brute_force(token_ids, least_match)
    assert len(drafts) == (5 if length else 0)
    if length:
        wanted = token_ids[-length:]
        text = [*token_ids, *drafts]
        ends = range(length - 1, len(token_ids) - 1)
        assert any(
            text[end + 1 - length : end + 1] == wanted and text[end + 1 : end + 6] == drafts
            for end in ends
        )


def test_sequences_never_mix_and_what_has_ended_is_forgotten() -> None:
    proposer = make_proposer(SpeculationOptions("ngram", ngram_min_match=2))
    first = Sequence("a", [1, 2, 3, 4], DecodingParams(9))
    second = Sequence("b", [1, 2], DecodingParams(9))
    assert proposer.propose(first, 2) is proposer.propose(second, 2) is None
    first.append(1)
    first.append(2)
    assert tokens_of(proposer.propose(first, 2)) == [3, 4]
    assert proposer.propose(second, 2) is None
    del first
    proposer.end(second)
    assert not proposer._indices


def test_tokens_are_entered_at_once_as_one_by_one() -> None:
    rng = random.Random(4)
    token_ids = [rng.randrange(12) for _ in range(300)]
    for least_match in (1, 2, 3, 5):
        at_once, one_by_one = NgramIndex(least_match), NgramIndex(least_match)
        at_once.add(token_ids)
        for count in range(len(token_ids)):
            one_by_one.add(token_ids[: count + 1])
        assert at_once._previous == one_by_one._previous
        for _ in range(50):
            token_ids.append(rng.randrange(12))
            assert at_once.propose(token_ids, 6) == one_by_one.propose(token_ids, 6)


def test_longer_matches_have_better_grades() -> None:
    grades = [graded((1,), length).grade for length in (2, 4, 5, 8, 11, 12, 31, 32)]
    assert grades == [0, 0, 1, 2, 2, 3, 3, 4]
