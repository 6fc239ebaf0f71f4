"""Proposes what earlier answers of the same cache domain said.

Agents and forms get similar answers again and again. Each cache domain and adapter has a ring of
tokens, which keeps the answers that have ended. The time of an answer depends on the drafts, so it
could tell one domain the answers of another. Therefore a ring is searched for its own domain alone.

A ring works as the window of LZ77 compressors. A table maps the hash of an n-gram to the position
of its newest occurrence's last token, and links lead to older occurrences. One that the ring has
overwritten is recognized by its position.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens

from quire.core.sequence import Sequence
from quire.speculation.ngram import MAX_CANDIDATES, graded, ngram_key, ngram_keys
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions
from quire.speculation.token_match import LONGEST_MATCH

RING_TOKENS = 1 << 15
"""Number of tokens of a ring; a power of two."""

BYTES_PER_TOKEN = 20
RING_BYTES = RING_TOKENS * BYTES_PER_TOKEN

NUM_PROMPT_TOKENS = 8
"""Number of the prompt's last tokens that are kept with an answer, to find its beginning."""

_BETWEEN = -1
"""Lies between two answers. It is no token, so no match goes beyond it."""


class AnswerRing:
    """The newest tokens of the answers of one domain.

    Positions count all tokens that ever entered; position p lies at index p % RING_TOKENS.
    Invariant: what `find` returns entered at most RING_TOKENS tokens ago.
    """

    def __init__(self, least_match: int) -> None:
        """least_match: see `NgramIndex`."""
        self._least_match = least_match
        self._num_tokens = 0
        self._tokens = array("i", [_BETWEEN]) * RING_TOKENS
        #: For each token, the position of an older n-gram with the same place in the table, or -1.
        self._previous = array("q", [-1]) * RING_TOKENS
        self._newest = array("q", [-1]) * RING_TOKENS

    def add(self, token_ids: Tokens[int]) -> None:
        """Enter an answer."""
        size, mask = self._least_match, RING_TOKENS - 1
        keys = list(ngram_keys(token_ids, size - 1, size))
        for index, token_id in enumerate((*token_ids, _BETWEEN)):
            at = self._num_tokens & mask
            self._tokens[at], self._previous[at] = token_id, -1
            if size <= index + 1 <= len(token_ids):
                slot = keys[index + 1 - size] & mask
                self._previous[at] = self._newest[slot]
                self._newest[slot] = self._num_tokens
            self._num_tokens += 1

    def find(self, token_ids: Tokens[int], most: int) -> Guess | None:
        """At most `most` tokens that followed the last tokens of token_ids in an answer."""
        size, mask = self._least_match, RING_TOKENS - 1
        if len(token_ids) < size:
            return None
        candidate = self._newest[ngram_key(token_ids, size) & mask]
        best, best_length = -1, size - 1
        for _ in range(MAX_CANDIDATES):
            if candidate < 0 or candidate < self._num_tokens - RING_TOKENS:
                break
            length = self._match_length(token_ids, candidate)
            is_last = self._tokens[(candidate + 1) & mask] == _BETWEEN
            if length > best_length and not is_last:
                best, best_length = candidate, length
                if length == LONGEST_MATCH:
                    break
            older = self._previous[candidate & mask]
            if older >= candidate:  # the link was overwritten
                break
            candidate = older
        following = self._following(best, most) if best >= 0 else []
        return graded(following, best_length) if following else None

    def _match_length(self, token_ids: Tokens[int], end: int) -> int:
        tokens, mask, last = self._tokens, RING_TOKENS - 1, len(token_ids) - 1
        most = min(LONGEST_MATCH, last + 1, end + 1, end + RING_TOKENS - self._num_tokens + 1)
        length = 0
        while length < most and tokens[(end - length) & mask] == token_ids[last - length]:
            length += 1
        return length

    def _following(self, end: int, most: int) -> list[int]:
        found: list[int] = []
        for position in range(end + 1, min(end + 1 + most, self._num_tokens)):
            token_id = self._tokens[position & (RING_TOKENS - 1)]
            if token_id == _BETWEEN:
                break
            found.append(token_id)
        return found


class HistoryProposer:
    """Proposes from the answers of a sequence's cache domain.

    Invariant: the rings take at most `max_bytes`; the domain whose ring was used least recently
    loses it first.
    """

    def __init__(self, least_match: int, max_bytes: int) -> None:
        """least_match: see `NgramIndex`."""
        self._least_match = least_match
        self._max_rings = max_bytes // RING_BYTES
        #: `Sequence.chain_root`, which stands for the domain and the adapter -> its answers.
        self._rings: OrderedDict[bytes, AnswerRing] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rings."""
        return len(self._rings) * RING_BYTES

    @property
    def max_bytes(self) -> int:
        """The most bytes that the rings take."""
        return self._max_rings * RING_BYTES

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """See `Proposer`."""
        if not sequence.speculation_history:
            return None
        ring = self._rings.get(sequence.chain_root)
        return None if ring is None else ring.find(sequence.token_ids, most)

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`. Keeps the answer, unless its request asked not to."""
        if not self._max_rings or not sequence.num_output_tokens or sequence.is_beam:
            return
        if not sequence.speculation_history:
            return
        root = sequence.chain_root
        ring = self._rings.pop(root, None) or AnswerRing(self._least_match)
        self._rings[root] = ring
        if len(self._rings) > self._max_rings:
            self._rings.popitem(last=False)
        first = max(0, sequence.num_prompt_tokens - NUM_PROMPT_TOKENS)
        ring.add(sequence.token_ids[first:][-RING_TOKENS // 2 :])


def make_proposer(options: SpeculationOptions) -> HistoryProposer:
    """The proposer "history"."""
    return HistoryProposer(options.ngram_min_match, options.speculation_history_size)
