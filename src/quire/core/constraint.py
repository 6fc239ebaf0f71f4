"""The protocol through which the scheduler asks a sequence's grammar for its end.

The engine gives a constraint to each sequence whose request has a grammar; `engine.token_masks` has
the implementation. The scheduler tells it each token, and learns from it when the sequence is over.
"""

from typing import Protocol


class Constraint(Protocol):
    """Follows a sequence's tokens; a pure function of the sequence's parameters and tokens."""

    #: A message once the grammar can't follow the tokens any further; the sequence then ends alone.
    #: None while it can.
    error: str | None
    #: Whether the grammar ended with the last token and that token is not an end token.
    ends_with_text: bool

    @property
    def is_ready(self) -> bool:
        """Whether the next step may be planned, because the next mask will be ready in time."""
        ...

    def take(self, token_id: int) -> bool:
        """Follow the sequence's next token. Returns whether the sequence ends with it: because the
        grammar is complete, the token is an end token, or an error occurred."""
        ...
