"""Compares the last tokens of two lists.

The API server imports it for the counts of predicted outputs, so it needs no numpy.
"""

from collections.abc import Sequence as Tokens

LONGEST_MATCH = 32
"""Matches of this many tokens count as equally good, so that the newest one is taken."""


def match_length(
    source: Tokens[int], end: int, token_ids: Tokens[int], most: int = LONGEST_MATCH
) -> int:
    """The length, at most `most`, of the longest sequence that both source[: end + 1] and token_ids
    end with."""
    last = len(token_ids) - 1
    most = min(most, end + 1, last + 1)
    length = 0
    while length < most and source[end - length] == token_ids[last - length]:
        length += 1
    return length
