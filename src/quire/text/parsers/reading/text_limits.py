"""Where a message can't have text, which decides what becomes of text that was cut.

Plain data. Called by the readers of messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the text of an answer can't be.

    Invariant: what the grammar of the same message allows as text is text here. Only half a mark
    directly behind a call is taken for the beginning of a further one.
    """

    #: False: the message is nothing but reasoning and calls.
    is_allowed: bool
    #: True: text does not begin with { or [, and has no mark of a call in it.
    differs_from_calls: bool
    #: The dialect's special tokens: each is a mark, or the beginning of one.
    special_tokens: tuple[str, ...]
