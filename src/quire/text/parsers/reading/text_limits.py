"""Constraints on the text of a message, which decide how cut-off text is read.

Plain data. Used by the readers of messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Constraints on the text of an answer.

    Invariant: text that the message's grammar allows as text is read as text. The only exception is
    a partial mark directly after a call, which is taken for the beginning of another call.
    """

    #: Whether a message may have text besides reasoning and calls.
    is_allowed: bool
    #: Whether text never begins with { or [, and never contains a mark of a call.
    differs_from_calls: bool
    #: The dialect's special tokens, each of which is a mark or the beginning of one.
    special_tokens: tuple[str, ...]
