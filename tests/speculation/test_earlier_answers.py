"""Proposals from other branches and from earlier answers, which never leave their cache domain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.speculation.sequences import finish, make_sequence

from quire.speculation import earlier_answers, siblings
from quire.speculation.earlier_answers import RING_BYTES, RING_TOKENS, AnswerRing
from quire.speculation.speculation_options import SpeculationOptions

OPTIONS = SpeculationOptions(speculation="history", speculation_history_size=3 * RING_BYTES)


def test_an_ended_answer_is_proposed_to_its_own_domain_alone() -> None:
    proposer = earlier_answers.make_proposer(OPTIONS)
    proposer.end(make_sequence([1, 2, 3], [4, 5, 6, 7, 8], root=b"mine"))
    guess = proposer.propose(make_sequence([9, 2, 3], [4], root=b"mine"), 3)
    assert guess is not None and guess.token_ids == [5, 6, 7]
    for root in (b"", b"yours"):
        assert proposer.propose(make_sequence([9, 2, 3], [4], root=root), 3) is None
    # The prompt is no answer, except for its last tokens.
    proposer.end(make_sequence(list(range(100, 200)), [4], root=b"mine"))
    assert proposer.propose(make_sequence([110, 111, 112], root=b"mine"), 3) is None


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_request_may_stay_out_of_the_history(is_asked: bool) -> None:
    proposer = earlier_answers.make_proposer(OPTIONS)
    kept, left_out, later = (make_sequence([1, 2, 3], [4, 5, 6]) for _ in range(3))
    kept.token_ids[-1], later.token_ids[3:] = 9, [4]
    left_out.speculation_history = False
    proposer.end(kept)
    proposer.end(left_out)
    later.speculation_history = is_asked
    guess = proposer.propose(later, 2)
    assert (guess and list(guess.token_ids)) == ([5, 9] if is_asked else None)
    assert not left_out.branch(1, left_out.params).speculation_history


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_proposed_depends_on_no_answer_of_another_domain(data: st.DataObject) -> None:
    """A tenant can time its own answers, and would see drafts from the answers of others.

    The domains of this test have room for their answers, so that none loses them to another one.
    """
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)
    calls = st.tuples(st.sampled_from((b"mine", b"yours")), st.booleans(), tokens, tokens)
    together, alone = (earlier_answers.make_proposer(OPTIONS) for _ in range(2))
    for root, is_end, prompt, answer in data.draw(st.lists(calls, max_size=20)):
        sequence = make_sequence(prompt, answer, root=root)
        if is_end:
            together.end(sequence)
        if root != b"mine":
            continue
        if is_end:
            alone.end(sequence)
        else:
            assert together.propose(sequence, 5) == alone.propose(sequence, 5)


def test_no_match_goes_from_one_answer_to_the_next() -> None:
    ring = AnswerRing(2)
    ring.add([1, 2, 3])
    ring.add([4, 5, 6])
    assert ring.find([2, 3], 4) is None
    assert ring.find([3, 4], 4) is None
    guess = ring.find([1, 2], 4)
    assert guess is not None and guess.token_ids == [3]


def test_the_domain_that_was_used_longest_ago_loses_its_answers_first() -> None:
    proposer = earlier_answers.make_proposer(OPTIONS)
    for root in (b"1", b"2", b"3", b"1", b"4"):
        proposer.end(make_sequence([1, 2, 3], [4, 5, 6], root=root))
    assert proposer.num_bytes == 3 * RING_BYTES
    found = [
        proposer.propose(make_sequence([1, 2, 3], root=root), 2) is not None
        for root in (b"1", b"2", b"3", b"4")
    ]
    assert found == [True, False, True, True]
    nothing = earlier_answers.make_proposer(
        SpeculationOptions("history", speculation_history_size=0)
    )
    nothing.end(make_sequence([1, 2, 3], [4, 5, 6]))
    assert nothing.num_bytes == 0 and nothing.propose(make_sequence([1, 2, 3]), 2) is None


@settings(max_examples=40)
@given(
    answers=st.lists(st.lists(st.integers(0, 4), max_size=40), max_size=30),
    asked=st.lists(st.integers(0, 4), min_size=2, max_size=12),
)
def test_what_is_found_follows_a_match_in_the_newest_answers(
    answers: list[list[int]], asked: list[int]
) -> None:
    ring, size = AnswerRing(2), 64
    kept = earlier_answers.RING_TOKENS
    earlier_answers.RING_TOKENS = size
    try:
        ring = AnswerRing(2)
        for answer in answers:
            ring.add(answer)
        guess = ring.find(asked, 5)
    finally:
        earlier_answers.RING_TOKENS = kept
    if guess is None:
        return
    found, text = list(guess.token_ids), []
    for answer in answers:
        text += [*answer, -1]
    text = text[-size:]
    wanted = [*asked[-2:], *found]
    assert any(text[at : at + len(wanted)] == wanted for at in range(len(text)))


def test_a_ring_forgets_its_oldest_tokens() -> None:
    ring = AnswerRing(3)
    ring.add([7, 8, 9, 10, 11])
    for _ in range(2 * RING_TOKENS // 1000):
        ring.add([1, 2, 3, 4, 5] * 200)
    assert ring.find([7, 8, 9], 2) is None
    guess = ring.find([3, 4, 5], 2)
    assert guess is not None and guess.token_ids == [1, 2]


def test_a_branch_finds_what_its_siblings_said_even_after_their_end() -> None:
    proposer = siblings.make_proposer(SpeculationOptions())
    ahead = make_sequence([1, 2, 3], [4, 5, 6, 7, 8])
    behind = make_sequence([1, 2, 3], [4])
    other = make_sequence([1, 2, 3], [4], request_id="b")
    assert proposer.propose(ahead, 3) is None
    for _ in range(2):
        guess = proposer.propose(behind, 3)
        assert guess is not None and guess.token_ids == [5, 6, 7]
        assert proposer.propose(other, 3) is None
        proposer.end(finish(ahead) if not ahead.is_finished else ahead)
    proposer.end(finish(behind))
    proposer.end(finish(other))
    assert not proposer._branches
