"""Chooses between the guesses of several proposers; implements `core`'s `Speculator`.

The chance that a guess is accepted depends on its proposer and grade, and on whether the sequence's
last drafts were accepted: a text that repeats another one goes on doing so.
"""

from collections.abc import Mapping
from enum import IntEnum
from weakref import WeakKeyDictionary

from quire.core.scheduling.proposals import NO_PROPOSAL, Proposal
from quire.core.sequence import Sequence
from quire.speculation.earlier_answers import HistoryProposer
from quire.speculation.proposer import Proposer
from quire.speculation.survival import Survival

DRAFTER_CHANCE = 0.6
"""The chance that a draft of the runner's drafter is accepted if those before it are, until that
was learned."""


class LastOutcome(IntEnum):
    """The outcome of a sequence's last drafts."""

    UNKNOWN = 0
    ALL_REJECTED = 1
    SOME_ACCEPTED = 2
    ALL_ACCEPTED = 3


class BestGuess:
    """Proposes the guess of which the most tokens are expected to be accepted."""

    def __init__(self, proposers: Mapping[str, Proposer], drafter: str = "") -> None:
        """proposers: by name. Among equally good guesses, the first proposer's is taken. drafter:
        the name under which the runner's drafter is counted, if there is one."""
        self.has_proposers = bool(proposers)
        self._drafter = drafter
        self._proposers = dict(proposers)
        self._survival = Survival()
        self._outcomes: WeakKeyDictionary[Sequence, LastOutcome] = WeakKeyDictionary()

    @property
    def max_answer_bytes(self) -> int:
        """The most bytes that earlier answers take."""
        found = self._proposers.values()
        return sum(each.max_bytes for each in found if isinstance(each, HistoryProposer))

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        outcome = self._outcomes.get(sequence, LastOutcome.UNKNOWN)
        best, most_expected = NO_PROPOSAL, 0.0
        for name, proposer in self._proposers.items():
            guess = proposer.propose(sequence, most)
            if guess is None or not guess.token_ids:
                continue
            kind = (name, guess.grade, outcome)
            survival = self._survival.estimate(kind, len(guess.token_ids), guess.chance)
            expected = sum(survival)
            if expected > most_expected:
                most_expected = expected
                best = Proposal(tuple(guess.token_ids), survival, name, kind)
        return best

    def expect(self, sequence: Sequence, most: int) -> Proposal:
        """See `Speculator`."""
        outcome = self._outcomes.get(sequence, LastOutcome.UNKNOWN)
        kind = (self._drafter, 0, outcome)
        survival = self._survival.estimate(kind, most, DRAFTER_CHANCE)
        return Proposal((), survival, self._drafter, kind)

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        """See `Speculator`."""
        num_verified = len(proposal.token_ids)
        self._survival.learn(proposal.kind, num_verified, num_accepted)
        outcome = LastOutcome.SOME_ACCEPTED
        if not num_accepted:
            outcome = LastOutcome.ALL_REJECTED
        elif num_accepted == num_verified:
            outcome = LastOutcome.ALL_ACCEPTED
        self._outcomes[sequence] = outcome

    def end(self, sequence: Sequence) -> None:
        """See `Speculator`."""
        self._outcomes.pop(sequence, None)
        for proposer in self._proposers.values():
            proposer.end(sequence)
