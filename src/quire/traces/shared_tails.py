"""Measures what prompts share behind their last whole common block: means, without saying of whom.

A recording compares prompts by whole blocks. What they share of the next one is known here, while
the server runs, and only two rounded means over all requests leave: enough for a replay to reach
the same hit rate. Of one prompt they tell something only to whoever knows all the others, and only
where it lies at an edge of the rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LEAST_REQUESTS = 32
"""Means over fewer are not given out. One of more is rounded to twice what a single prompt can move
it by, where as many are as the greatest power of two below: so it doesn't tell how many they were.
"""

MAX_KEPT = 4096
"""Blocks whose following tokens are kept, less than a block each; those used least recently go."""


class SharedTails:
    """Prompts are compared with an earlier one that had the same last known block.

    Where that block is the last of an earlier request, and the prompt goes on with the rest of that
    request and its whole answer, it is a later turn: it counts as continued. What any other prompt
    has in common with an earlier one counts for the mean.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._heads: dict[bytes, array[int]] = {}
        self._ends: dict[bytes, array[int]] = {}
        self._num_compared = self._num_common_tokens = 0
        self._num_behind_ends = self._num_continued = 0

    @property
    def shared_tail_tokens(self) -> int | None:
        """See `Trace`. None where too few prompts were compared."""
        mean = _rounded_mean(self._num_common_tokens, self._num_compared, self._block_tokens - 1)
        return None if mean is None else round(mean)

    @property
    def continued_share(self) -> float | None:
        """See `Trace`. None where too few prompts came into question."""
        mean = _rounded_mean(self._num_continued, self._num_behind_ends, 1)
        return None if mean is None else round(mean, 2)

    def compare(self, last_known: bytes, rest: Sequence[int], *, is_answer: bool) -> None:
        """A prompt came. last_known: the digest of its last block that an earlier request had, too.
        rest: up to a block of the tokens behind it. is_answer: an answer has filled that block, so
        that the recording itself tells what the prompt goes on from."""
        end = self._ends.get(last_known)
        if end is not None:
            self._num_behind_ends += 1
            if len(rest) >= len(end) and array("q", rest[: len(end)]) == end:
                self._num_continued += 1
                return
        if is_answer or not rest:
            return
        head = self._heads.pop(last_known, None)
        if head is None:
            _keep(self._heads, last_known, rest)
            return
        self._heads[last_known] = head  # again the latest
        common = 0
        most = min(len(rest), len(head), self._block_tokens - 1)
        while common < most and rest[common] == head[common]:
            common += 1
        self._num_compared += 1
        self._num_common_tokens += common

    def note_end(self, last: bytes, tokens: Sequence[int], *, is_answer: bool) -> None:
        """A request has ended. last: the last whole block of its prompt and answer. tokens: of
        both, behind it. is_answer: the answer has filled that block."""
        self._ends.pop(last, None)
        if not is_answer:
            _keep(self._ends, last, tokens)

    def forget(self) -> None:
        """Drop all tokens."""
        self._heads.clear()
        self._ends.clear()


def _rounded_mean(total: int, number: int, most: int) -> float | None:
    """Of values from 0 to `most`; see LEAST_REQUESTS."""
    if number < LEAST_REQUESTS:
        return None
    step = 2 * most / (1 << number.bit_length() - 1)
    return min(most, round(total / number / step) * step) if step else 0.0


def _keep(kept: dict[bytes, array[int]], digest: bytes, tokens: Sequence[int]) -> None:
    kept[digest] = array("q", tokens)
    if len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
