"""The interface between the scheduler and the speculation, which guesses tokens."""

from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.core.draft_stops import DraftStop
from quire.core.sequence import Sequence
from quire.core.step import Drafted


class Proposal(NamedTuple):
    """Tokens that may follow a sequence's tokens."""

    token_ids: tuple[int, ...] = ()
    #: Parallel to token_ids: the estimated chance that this token and all before it are accepted,
    #: which never grows from one token to the next.
    survival: tuple[float, ...] = ()
    #: Name of the proposer that guessed the tokens.
    proposer: str = ""
    #: The speculator's own key, under which it counts the outcome.
    kind: Hashable = None


NO_PROPOSAL = Proposal()


class Speculator(Protocol):
    """Guesses the next tokens of sequences. Guesses change how fast tokens come, but no token."""

    #: Whether `propose` ever has a guess. Read only if there is a drafter.
    has_proposers: bool

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """At most `most` tokens of the vocabulary that may follow `sequence.token_ids`;
        NO_PROPOSAL if there is no good guess.

        Called in the planning of steps, so it must be quick. May read all of the sequence.
        """
        ...

    def expect(self, sequence: Sequence, most: int) -> Proposal:
        """The chances that the runner's drafter guesses the next tokens, at most `most` of them, as
        a proposal without tokens. Called only if the runner has a drafter."""
        ...

    def stop(self, sequence: Sequence) -> DraftStop:
        """The learned chances of the drafter's drafts by its own probabilities; of the result only
        these are read. Called only if there is a drafter."""
        ...

    def learn_drafter(
        self,
        sequence: Sequence,
        ordered: Proposal,
        drafted: Drafted,
        num_verified: int,
        token_ids: Tokens[int],
    ) -> None:
        """Learn what came of drafts that were ordered as `expect` proposed.

        drafted: has at least one draft. num_verified: the number of its drafts that the step
        verified, may be 0. token_ids: the tokens that the step sampled, at least one.
        """
        ...

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None:
        """Learn how many tokens of a known proposal were accepted. The proposal has only the
        tokens that a step verified."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Learn that a sequence has ended. No proposal for it follows."""
        ...


@dataclass(slots=True)
class DraftCounts:
    """Counts of one proposer's drafts, by their place after the row's tokens."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_verified: int, num_accepted: int) -> None:
        """Count the drafts of one row in a step."""
        for counts, number in ((self.verified, num_verified), (self.accepted, num_accepted)):
            counts.extend([0] * (number - len(counts)))
            for place in range(number):
                counts[place] += 1
