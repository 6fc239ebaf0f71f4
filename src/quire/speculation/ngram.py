"""Proposes the tokens that followed an earlier occurrence of a sequence's last tokens.

Answers often quote their prompts: edited files, tool results, tables. This proposer looks in the
sequence's own tokens, prompt and output, for the place where its last tokens occurred before, and
proposes what followed there, as prompt lookup decoding (Saxena, 2023) and LLMA (arXiv:2304.04487)
do. It needs no weights and no torch.

Occurrences are found as in LZ77 compressors: a table has the last end of each n-gram of
`least_match` tokens, and a list links each end to the one before it with the same n-gram. A step
adds its new tokens, at constant cost each, and compares at most MAX_CANDIDATES occurrences.
"""

from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from quire.core.sequence import Sequence
from quire.speculation.speculation_options import SpeculationOptions

MAX_CANDIDATES = 16
"""Most occurrences of the last n-gram that are compared; newer ones come first."""

LONGEST_MATCH = 32
"""Matches of this many tokens count as equally good, so that the newest one is taken."""


class NgramIndex:
    """The n-grams of one sequence.

    Invariant: the table and the links cover the first `len(self._previous)` tokens of the sequence,
    whose tokens only ever grow at their end.
    """

    __slots__ = ("_last_end", "_least_match", "_previous")

    def __init__(self, least_match: int) -> None:
        """least_match: number of tokens, at least 1, that an occurrence must have in common with
        the sequence's end."""
        self._least_match = least_match
        #: N-gram -> index of the last token of its newest occurrence.
        self._last_end: dict[tuple[int, ...], int] = {}
        #: For each token, the end of the occurrence before of the n-gram that ends there, or -1.
        self._previous: list[int] = []

    def propose(self, token_ids: Tokens[int], most: int) -> list[int]:
        """At most `most` tokens that may follow token_ids, which are all tokens of the sequence.

        Returns none if the last `least_match` tokens occur nowhere before.
        """
        self._add(token_ids)
        best, best_length = -1, 0
        candidate = self._previous[-1] if self._previous else -1
        for _ in range(MAX_CANDIDATES):
            if candidate < 0:
                break
            length = self._match_length(token_ids, candidate)
            if length > best_length:
                best, best_length = candidate, length
                if length == LONGEST_MATCH:
                    break
            candidate = self._previous[candidate]
        if best < 0:
            return []
        # If fewer than `most` tokens follow the occurrence, the drafts repeat with the distance
        # between the two occurrences as their period.
        period = len(token_ids) - 1 - best
        following = list(token_ids[best + 1 : best + 1 + most])
        while len(following) < most:
            following.append(following[-period])
        return following

    def _add(self, token_ids: Tokens[int]) -> None:
        """Enter the n-grams that end in tokens which were not seen yet."""
        size, last_end, previous = self._least_match, self._last_end, self._previous
        for end in range(len(previous), len(token_ids)):
            if end + 1 < size:
                previous.append(-1)
                continue
            ngram = tuple(token_ids[end + 1 - size : end + 1])
            previous.append(last_end.get(ngram, -1))
            last_end[ngram] = end

    def _match_length(self, token_ids: Tokens[int], end: int) -> int:
        """Number of tokens, at most LONGEST_MATCH, that end at index `end` and also end the
        sequence."""
        length = self._least_match
        last = len(token_ids) - 1
        most = min(LONGEST_MATCH, end + 1)
        while length < most and token_ids[end - length] == token_ids[last - length]:
            length += 1
        return length


class NgramProposer:
    """Proposes from each sequence's own tokens; implements `core.scheduling.drafts.Proposer`.

    Invariant: no index has tokens of two sequences.
    """

    def __init__(self, least_match: int) -> None:
        """least_match: see `NgramIndex`."""
        self._least_match = least_match
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """See `Proposer`."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self._least_match)
        return index.propose(sequence.token_ids, most)


def make_proposer(options: SpeculationOptions) -> NgramProposer:
    """The proposer of `--speculation ngram`."""
    return NgramProposer(options.ngram_min_match)
