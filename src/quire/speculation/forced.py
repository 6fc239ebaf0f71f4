"""Proposes the tokens that a grammar leaves no choice about.

In an answer that follows a JSON schema, or in a tool call, much of the text is fixed: braces,
names, quotes. The grammar tells the bytes that must follow, and the tokenizer splits them into
tokens. The model may choose other tokens for the same text, so the tokens are only drafts.
"""

from quire.core.sequence import Sequence
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions

CHANCE = 0.9


class ForcedProposer:
    """Proposes the forced tokens of a sequence's grammar."""

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """See `Proposer`."""
        if sequence.constraint is None:
            return None
        forced = sequence.constraint.forced_tokens(most)
        return Guess(forced, 0, CHANCE) if forced else None

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`. Nothing is kept about a sequence."""


def make_proposer(options: SpeculationOptions) -> ForcedProposer:
    """The proposer "forced"."""
    return ForcedProposer()
