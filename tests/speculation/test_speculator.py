"""The choice between several proposers."""

from tests.speculation.sequences import make_sequence

from quire.core.scheduling.proposals import NO_PROPOSAL
from quire.core.sequence import Sequence
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
    for _ in range(12):
        proposal = speculator.propose(unlucky, 2)
        chances.append(proposal.survival[0])
        speculator.learn(unlucky, proposal, 0)
    assert chances[1] > 0.9
    assert chances[2] < 0.3
    assert chances[-1] < 0.05
    speculator.learn(unlucky, speculator.propose(unlucky, 2), 2)
    speculator.learn(unlucky, speculator.propose(unlucky, 2), 0)
    assert speculator.propose(unlucky, 2).survival[0] > 0.9  # one rejection again


def test_every_proposer_learns_of_an_end() -> None:
    first, second = Fixed(), Fixed()
    sequence = make_sequence([1])
    BestGuess({"first": first, "second": second}).end(sequence)
    assert first.ended == second.ended == [sequence]
