"""The interface of proposers. Each guesses the tokens that follow a sequence's tokens in one way.

`speculator` asks all proposers that are in use, learns how often their guesses are accepted, and
gives the scheduler the best guess. docs/extending.md shows how to write a proposer.
"""

from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

from quire.core.sequence import Sequence


class Guess(NamedTuple):
    """Tokens that may follow a sequence's tokens."""

    token_ids: Tokens[int]
    #: How good the guess is, as one of a few numbers that the proposer chooses. The chance that
    #: tokens are accepted is learned for each grade.
    grade: int = 0
    #: The chance that a token is accepted if those before it are, until that was learned.
    chance: float = 0.5


class Proposer(Protocol):
    """Guesses the next tokens of sequences. Guesses change how fast tokens come, but no token."""

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """At most `most` tokens of the vocabulary that may follow `sequence.token_ids`; None if
        there is no good guess.

        Called in the planning of steps, so it must be quick. The proposer may read all of the
        sequence, and keep data of its own about it.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Learn that a sequence has ended; no other call for it follows."""
        ...
