"""Constraints on an answer's text, by which parsers tell text from incomplete calls.

Used by the parsers of messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Constraints on the text of an answer.

    Invariant: what the message's grammar allows as text is parsed as text. The only exception is a
    partial mark directly after a call, which is parsed as the beginning of another call.
    """

    #: True if a message may have text besides reasoning and calls.
    is_allowed: bool
    #: True if text never begins with { or [, and never contains a mark of a call.
    differs_from_calls: bool
    #: The dialect's special tokens. Each is a mark or the beginning of a mark.
    special_tokens: tuple[str, ...]
