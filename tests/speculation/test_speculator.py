"""The choice between several proposers."""

import pytest
from tests.speculation.sequences import make_sequence

from quire.core.content_spans import ContentSpan
from quire.core.draft_stops import grade_of
from quire.core.scheduling.proposals import NO_PROPOSAL
from quire.core.sequence import Sequence
from quire.core.step import Drafted
from quire.speculation.proposer import Guess
from quire.speculation.speculator import BestGuess


class Fixed:
    """Proposes the same tokens to every sequence."""

    def __init__(self, *token_ids: int, chance: float = 0.5) -> None:
        self.guess = Guess(token_ids, 0, chance) if token_ids else None
        self.ended: list[Sequence] = []

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        return self.guess

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence)


def test_the_guess_with_the_most_expected_tokens_wins() -> None:
    sequence = make_sequence([1], [2])
    sure, long = Fixed(1, 2, chance=0.9), Fixed(3, 4, 5, 6, chance=0.5)
    chosen = BestGuess({"none": Fixed(), "long": long, "sure": sure}).propose(sequence, 4)
    assert (chosen.proposer, chosen.token_ids) == ("sure", (1, 2))  # 1.71 against 0.94 tokens
    assert chosen.survival == (0.9, 0.9 * 0.9)
    assert BestGuess({"none": Fixed()}).propose(sequence, 4) == NO_PROPOSAL


def test_outcomes_change_the_choice() -> None:
    sequence = make_sequence([1], [2])
    speculator = BestGuess({"bad": Fixed(1, 2, chance=0.9), "good": Fixed(3, 4, chance=0.5)})
    for _ in range(20):
        proposal = speculator.propose(sequence, 2)
        speculator.learn(sequence, proposal, 0 if proposal.proposer == "bad" else 2)
    assert speculator.propose(sequence, 2).proposer == "good"


def test_the_last_outcome_of_a_sequence_counts() -> None:
    speculator = BestGuess({"one": Fixed(1, 2)})
    lucky, unlucky = make_sequence([1], [2]), make_sequence([3], [4])
    for _ in range(20):
        speculator.learn(lucky, speculator.propose(lucky, 2), 2)
        speculator.learn(unlucky, speculator.propose(unlucky, 2), 0)
    assert speculator.propose(lucky, 2).survival[1] > 0.8
    assert speculator.propose(unlucky, 2).survival[0] < 0.2


def test_rejections_in_a_row_soon_lower_the_chance_whatever_other_sequences_accept() -> None:
    speculator = BestGuess({"one": Fixed(1, 2)})
    lucky, unlucky = make_sequence([1], [2]), make_sequence([3], [4])
    for _ in range(100):
        # One rejection between others is usual here, so the chance after one stays high.
        speculator.learn(lucky, speculator.propose(lucky, 2), 0)
        speculator.learn(lucky, speculator.propose(lucky, 2), 2)
    chances = []
    for _ in range(16):
        proposal = speculator.propose(unlucky, 2)
        chances.append(proposal.survival[0])
        speculator.learn(unlucky, proposal, 0)
    assert chances[1] > 0.9
    assert chances[2] == 0.5  # the guess's own, since two in a row are new
    assert chances[-1] < 0.15
    speculator.learn(unlucky, speculator.propose(unlucky, 2), 2)
    speculator.learn(unlucky, speculator.propose(unlucky, 2), 0)
    assert speculator.propose(unlucky, 2).survival[0] > 0.9  # one rejection again


def drafted(*drafts: tuple[int, float]) -> Drafted:
    """Drafts, each with the probability that the drafter gives it."""
    token_ids, probabilities = zip(*drafts, strict=True)
    return Drafted(token_ids, 2, probabilities)


def test_the_chances_of_a_drafters_drafts_are_learned_by_its_probabilities() -> None:
    """Here drafts with a probability of 0.5 are always right, and those with 0.95 never."""
    speculator, sequence = BestGuess({}, "small"), make_sequence([1], [2])
    assert speculator.stop(sequence).survival((0.5, 0.95)) == (0.5, pytest.approx(0.5 * 0.935))
    for _ in range(20):
        ordered = speculator.expect(sequence, 4)
        made = drafted((7, 0.5), (8, 0.5), (9, 0.95))
        speculator.learn_drafter(sequence, ordered, made, 2, (7, 8, 3))
    stop = speculator.stop(sequence)
    first, second, third = stop.survival((0.5, 0.5, 0.95))
    assert first > second > 0.8 and third < 0.15
    assert stop.allows_next(7, (0.5,))
    unsure = stop._replace(least_chance=0.3)
    # What follows a draft of this grade is right in half of the cases: 8 is right, and 9 wrong.
    assert unsure.allows_next(7, (0.5,)) and not unsure.allows_next(7, (0.5, 0.95))
    assert not stop._replace(end_token_ids=frozenset({7})).allows_next(7, (0.5,))


def test_a_draft_that_was_not_verified_teaches_by_the_token_in_its_place() -> None:
    speculator, sequence = BestGuess({}, "small"), make_sequence([1], [2])
    before = speculator.stop(sequence).chances[grade_of(0.3)]
    for _ in range(10):
        ordered = speculator.expect(sequence, 4)
        speculator.learn_drafter(sequence, ordered, drafted((7, 0.3)), 0, (7,))
    assert before < 0.4 and speculator.stop(sequence).chances[grade_of(0.3)] > 0.8
    # But drafts that nobody verifies bring nothing.
    assert speculator.expect(sequence, 4).survival[0] < 0.2


def test_a_drafter_that_goes_on_behind_the_end_of_a_sequence_has_brought_nothing() -> None:
    speculator, sequence = BestGuess({}, "small"), make_sequence([1], [2])
    for _ in range(10):
        ordered = speculator.expect(sequence, 4)
        made = drafted((7, 0.9), (8, 0.9))
        speculator.learn_drafter(sequence, ordered, made, 1, (7, 3))  # 8 would have been the end
    survival = speculator.expect(sequence, 4).survival
    assert survival[0] > 0.8 and survival[1] < 0.2


def test_every_proposer_learns_of_an_end() -> None:
    first, second = Fixed(), Fixed()
    sequence = make_sequence([1])
    BestGuess({"first": first, "second": second}).end(sequence)
    assert first.ended == second.ended == [sequence]


def test_no_placeholder_of_a_content_is_drafted() -> None:
    speculator = BestGuess({"one": Fixed(1, 7, 7, 2), "two": Fixed(7)})
    plain, pictured = make_sequence([1, 7, 7, 2], [1]), make_sequence([1, 7, 8, 2], [1])
    assert speculator.propose(plain, 4).token_ids == (1, 7, 7, 2)
    pictured.content_spans = (ContentSpan(1, 2, "0" * 32),)
    assert speculator.propose(pictured, 4).token_ids == (1,)
    assert BestGuess({"two": Fixed(7)}).propose(pictured, 4) == NO_PROPOSAL
    speculator.end(pictured)
