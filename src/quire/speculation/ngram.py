"""Proposes the tokens that followed an earlier occurrence of a sequence's last tokens.

Answers often quote their prompts: edited files, tool results, tables. This proposer looks in the
sequence's own tokens, prompt and output, for the place where its last tokens occurred before, and
proposes what followed there, as prompt lookup decoding (Saxena, 2023) and LLMA (arXiv:2304.04487)
do. It needs no weights and no torch.

Occurrences are found as in LZ77 compressors: a table has the last end of each n-gram of
`least_match` tokens, and a list links each end to the one before it with the same n-gram. A step
adds its new tokens, at constant cost each, and compares at most MAX_CANDIDATES occurrences.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from quire.core.sequence import Sequence
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions
from quire.speculation.token_match import LONGEST_MATCH, match_length

MAX_CANDIDATES = 16
"""Most occurrences of the last n-gram that are compared; newer ones come first."""

GRADES = (5, 8, 12, LONGEST_MATCH)
"""Matches shorter than each of these numbers of tokens have a grade of their own."""

CHANCES = (0.4, 0.6, 0.75, 0.9, 0.95)
"""For each grade, the chance that a draft is accepted, until it was learned."""


def ngram_keys(token_ids: Tokens[int], first_end: int, size: int) -> Iterator[int]:
    """For each index from first_end on, at least `size - 1`, a hash of the `size` tokens that end
    there."""
    shifted = [token_ids[first_end + 1 - size + place :] for place in range(size)]
    return map(hash, zip(*shifted, strict=False))  # the last of them is the shortest


def ngram_key(token_ids: Tokens[int], size: int) -> int:
    """The key of the last `size` tokens."""
    return hash(tuple(token_ids[-size:]))


def graded(token_ids: Tokens[int], length: int) -> Guess:
    """The guess of the tokens that followed a match of `length` tokens."""
    grade = sum([length >= least for least in GRADES])
    return Guess(token_ids, grade, CHANCES[grade])


class NgramIndex:
    """The n-grams of one sequence.

    Invariant: the table and the links cover the first `len(self._previous)` tokens of the sequence,
    whose tokens only ever grow at their end.
    """

    __slots__ = ("_first", "_last_end", "_least_match", "_previous")

    def __init__(self, least_match: int, first: int = 0) -> None:
        """least_match: number of tokens, at least 1, that an occurrence must have in common with
        the sequence's end. first: index of the first token that is searched."""
        self._least_match = least_match
        #: Key of an n-gram -> index of the last token of its newest occurrence.
        self._last_end: dict[int, int] = {}
        #: For each token, the end of the occurrence before of the n-gram that ends there, or -1.
        self._previous: list[int] = [-1] * first
        self._first = first

    def propose(self, token_ids: Tokens[int], most: int) -> Guess | None:
        """At most `most` tokens that may follow token_ids, which are all tokens of the sequence.

        None if the last `least_match` tokens occur nowhere before.
        """
        self.add(token_ids)
        best, best_length = self._find(
            token_ids, token_ids, self._previous[-1] if self._previous else -1
        )
        if best < 0 or most < 1:
            return None
        # If fewer than `most` tokens follow the occurrence, the drafts repeat with the distance
        # between the two occurrences as their period.
        period = len(token_ids) - 1 - best
        following = list(token_ids[best + 1 : best + 1 + most])
        while len(following) < most:
            following.append(following[-period])
        return graded(following, best_length)

    def find_in(self, source: Tokens[int], token_ids: Tokens[int], most: int) -> Guess | None:
        """At most `most` tokens of the sequence `source`, which this index is of, that may follow
        the tokens of another sequence."""
        self.add(source)
        size = self._least_match
        if len(token_ids) < size:
            return None
        newest = self._last_end.get(ngram_key(token_ids, size), -1)
        best, length = self._find(source, token_ids, newest)
        following = source[best + 1 : best + 1 + most] if best >= 0 else ()
        return graded(following, length) if following else None

    def _find(self, source: Tokens[int], token_ids: Tokens[int], candidate: int) -> tuple[int, int]:
        """The end and the length of the longest match with the end of token_ids; -1 for no match.

        Compares the candidate and the ends that it links to. The last token of source does not
        count, because no token follows it.
        """
        best, best_length = -1, self._least_match - 1
        for _ in range(MAX_CANDIDATES):
            if candidate < 0:
                break
            length = match_length(source, candidate, token_ids)
            if length > best_length and candidate + 1 < len(source):
                best, best_length = candidate, length
                if length == LONGEST_MATCH:
                    break
            candidate = self._previous[candidate]
        return best, best_length

    def add(self, token_ids: Tokens[int]) -> None:
        """Enter the n-grams that end in tokens which were not seen yet."""
        last_end, previous = self._last_end, self._previous
        first_end = self._first + self._least_match - 1
        if len(previous) < first_end:
            previous += [-1] * (min(first_end, len(token_ids)) - len(previous))
        keys = ngram_keys(token_ids, max(first_end, len(previous)), self._least_match)
        for end, key in enumerate(keys, len(previous)):
            previous.append(last_end.get(key, -1))
            last_end[key] = end


class NgramProposer:
    """Proposes from each sequence's own tokens.

    Invariant: no index has tokens of two sequences.
    """

    def __init__(self, least_match: int) -> None:
        """least_match: see `NgramIndex`."""
        self._least_match = least_match
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """See `Proposer`."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self._least_match)
        return index.propose(sequence.token_ids, most)

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`."""
        self._indices.pop(sequence, None)


def make_proposer(options: SpeculationOptions) -> NgramProposer:
    """The proposer "ngram"."""
    return NgramProposer(options.ngram_min_match)
