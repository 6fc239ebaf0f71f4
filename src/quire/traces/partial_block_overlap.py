"""Measures the mean number of tokens that two prompts share after their last common full block.

A recording compares prompts by full blocks only. While the server runs, this module also compares
the tokens after those blocks. It publishes two rounded means over all requests: the number of
shared tokens, and the share of prompts that continue an earlier request. A replay needs both to
reach the recorded hit rate. A mean reveals something of a prompt only to a reader who knows all
other prompts, and only if that prompt decides whether the mean is rounded up or down.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

#: A mean over fewer requests is not published. The mean of n values between 0 and m is rounded to
#: steps of 2 m / 2^floor(log2 n), so that neither a single value nor n can be inferred from it.
LEAST_REQUESTS = 32

#: The maximum number of blocks whose following tokens are stored; the least recently used block is
#: dropped first.
MAX_STORED = 4096


class PartialBlockOverlap:
    """Compares each new prompt with an earlier request after their last common full block.

    A prompt continues the earlier request if that block is the earlier request's last full block,
    and the prompt repeats all tokens that follow the block in that request. For any other prompt,
    the number of tokens that it shares with the earlier prompt enters the mean.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._heads: dict[bytes, array[int]] = {}
        self._ends: dict[bytes, array[int]] = {}
        self._num_compared = self._num_common_tokens = 0
        self._num_behind_ends = self._num_continued = 0

    @property
    def shared_tail_tokens(self) -> int | None:
        """The rounded mean for `Trace.shared_tail_tokens`; None if too few prompts were
        compared."""
        mean = _rounded_mean(self._num_common_tokens, self._num_compared, self._block_tokens - 1)
        return None if mean is None else round(mean)

    @property
    def continued_share(self) -> float | None:
        """The rounded share for `Trace.continued_share`; None if too few prompts share an earlier
        request up to its last full block."""
        mean = _rounded_mean(self._num_continued, self._num_behind_ends, 1)
        return None if mean is None else round(mean, 2)

    def compare(self, last_known: bytes, rest: Sequence[int], *, is_answer: bool) -> None:
        """Compare a new prompt.

        `last_known` is the digest of the prompt's last block that also occurs in an earlier
        request. `rest` holds the tokens after that block, at most one block of them. `is_answer`:
        an answer filled that block, so the recording already names the request that the prompt
        continues.
        """
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
            _store_bounded(self._heads, last_known, rest)
            return
        self._heads[last_known] = head  # now the most recently used
        common = 0
        most = min(len(rest), len(head), self._block_tokens - 1)
        while common < most and rest[common] == head[common]:
            common += 1
        self._num_compared += 1
        self._num_common_tokens += common

    def record_end(self, last: bytes, tokens: Sequence[int], *, is_answer: bool) -> None:
        """Record a request that has ended.

        `last` is the digest of the last full block of its prompt and answer, and `tokens` are the
        tokens after that block. `is_answer`: the answer filled that block.
        """
        self._ends.pop(last, None)
        if not is_answer:
            _store_bounded(self._ends, last, tokens)

    def forget(self) -> None:
        """Drop all tokens."""
        self._heads.clear()
        self._ends.clear()


def _rounded_mean(total: int, number: int, most: int) -> float | None:
    """The rounded mean of `number` values from 0 to `most`; None below LEAST_REQUESTS values."""
    if number < LEAST_REQUESTS:
        return None
    step = 2 * most / (1 << number.bit_length() - 1)
    return min(most, round(total / number / step) * step) if step else 0.0


def _store_bounded(stored: dict[bytes, array[int]], digest: bytes, tokens: Sequence[int]) -> None:
    stored[digest] = array("q", tokens)
    if len(stored) > MAX_STORED:
        del stored[next(iter(stored))]
