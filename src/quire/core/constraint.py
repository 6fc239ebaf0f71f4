"""The protocol by which a sequence's grammar tells the scheduler that the sequence ends.

The engine gives a constraint to each sequence whose request has a grammar; `engine.token_masks` has
the implementation. The scheduler passes each new token to the constraint, whose answer says whether
the sequence is over.
"""

from typing import Protocol


class Constraint(Protocol):
    """Follows a sequence's tokens; a pure function of the sequence's parameters and tokens."""

    #: An error message if the grammar can't follow the tokens any further, which ends this sequence
    #: only; else None.
    error: str | None
    #: Whether the last token completed the grammar without being an end token.
    ends_with_text: bool

    @property
    def is_ready(self) -> bool:
        """Whether the next step may be planned, because the next mask will be ready in time."""
        ...

    def take(self, token_id: int) -> bool:
        """Follow the sequence's next token. Returns whether the sequence ends with it: because the
        grammar is complete, the token is an end token, or an error occurred."""
        ...
