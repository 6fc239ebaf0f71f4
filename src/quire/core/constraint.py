"""What the tokens of a sequence must obey, as the scheduler sees it.

The engine gives a constraint to a sequence whose request has a grammar; `engine.token_masks` has
the one there is. The scheduler tells it each token, and learns from it when the sequence is over.
"""

from typing import Protocol


class Constraint(Protocol):
    """A pure function of the sequence's parameters and tokens, like all state but the KV.

    error: a sentence, once the tokens can't be followed any further; the sequence then ends alone.
    ends_with_text: whether nothing may follow the last token, which is no end token.
    """

    error: str | None
    ends_with_text: bool

    @property
    def is_ready(self) -> bool:
        """Whether the next step may be planned: its mask will be there in time."""
        ...

    def take(self, token_id: int) -> bool:
        """The sequence's next token. Returns whether it ends with it: nothing may follow, the token
        is an end, or there is an error."""
        ...
