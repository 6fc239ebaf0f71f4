"""Predicts output lengths, and the peak of blocks that they need.

Admission uses both, so that admitted sequences are seldom preempted. Both predictions follow the
Past-Future scheduler (Gong et al., Past-Future Scheduler for LLM Serving under SLA Guarantees,
ASPLOS 2025). The lengths of ended outputs predict the lengths of running outputs, and memory peaks
just before a sequence ends. This module computes with plain numbers only.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import pairwise

BINS_PER_DOUBLING = 8
LONGEST_TOKENS = 1 << 20


def _edges() -> list[int]:
    """The bins' edges: 0, 1, 2, ... and from 8 on eight for each doubling; bin i is (edges[i],
    edges[i+1]]."""
    last = BINS_PER_DOUBLING * int(math.log2(LONGEST_TOKENS))
    return sorted({0, *(round(2 ** (index / BINS_PER_DOUBLING)) for index in range(last + 1))})


EDGES = _edges()
# The width of each bin, and the prior's share in it.
_WIDTHS = [high - low for low, high in pairwise(EDGES)]
_PRIOR = [math.log2((high + 1) / (low + 1)) for low, high in pairwise(EDGES)]


class OutputLengthPredictor:
    """The mean remaining length of an output, given its length so far.

    A histogram of finished lengths, whose weights decay exponentially, is added to a prior: one
    observation, spread evenly over the logarithm of the length. The prior matters before any output
    has ended (it predicts most of a small limit, half of 4,096, a fifth of 131,072) and beyond the
    longest length seen. It also corrects for the first outputs to end, which are the short ones.
    Lengths count as evenly distributed within a bin, which is up to 9% wide.

    Invariant: `_survivors[i]` is the weight of lengths above EDGES[i], prior included, and
    `_survived[i]` its integral from EDGES[i] on, unless `_is_stale`.
    """

    def __init__(self, num_remembered: float = 1000.0) -> None:
        """num_remembered: number of later outputs after which an output's weight has fallen to
        1/e."""
        assert num_remembered >= 1
        self._weights = [0.0] * (len(EDGES) - 1)
        self._decay = math.exp(-1 / num_remembered)
        self._unit = 1.0  # the weight of the next observation; growing it ages all others
        self._survivors: list[float] = []
        self._survived: list[float] = []
        self._is_stale = True

    def observe(self, num_output_tokens: int) -> None:
        """Learn from an output that ended normally at this length, at least 1."""
        assert num_output_tokens >= 1
        self._weights[bisect_left(EDGES, min(num_output_tokens, LONGEST_TOKENS)) - 1] += self._unit
        self._unit /= self._decay
        if self._unit > 1e100:
            self._weights = [weight / self._unit for weight in self._weights]
            self._unit = 1.0
        self._is_stale = True

    def expected_remaining(self, num_output_tokens: int, limit: int) -> int:
        """Expected number of tokens after num_output_tokens, rounded up; limit: most tokens of the
        output.

        The mean of min(length, limit) - num_output_tokens over the lengths above num_output_tokens:
        the integral of the survival function from here to the limit, divided by its value here.
        """
        return self.all_expected_remaining([(num_output_tokens, limit)])[0]

    def all_expected_remaining(self, outputs: Iterable[tuple[int, int]]) -> list[int]:
        """`expected_remaining` of many outputs at once, each (num_output_tokens, limit).

        A step may need this for every running sequence, so it avoids a call per sequence.
        """
        if self._is_stale:
            self._sum_up()
        above = self._above
        beyond: dict[int, float] = {}  # limit -> integral above it; many outputs share a limit
        found: list[int] = []
        for num_tokens, limit in outputs:
            if num_tokens >= limit:
                found.append(0)
                continue
            if limit not in beyond:
                beyond[limit] = above(limit)[1]
            weight, area = above(num_tokens)
            remaining = (area - beyond[limit]) / weight if weight > 0 else 0.0
            least = math.ceil(remaining - 1e-6)
            if least < 1:
                least = 1
            found.append(least if least < limit - num_tokens else limit - num_tokens)
        return found

    def _above(self, num_tokens: int) -> tuple[float, float]:
        """The weight of longer lengths, and its integral from there on."""
        if num_tokens >= LONGEST_TOKENS:
            return 0.0, 0.0
        upper = bisect_left(EDGES, num_tokens + 1)
        low, high = EDGES[upper - 1], EDGES[upper]
        at_low, at_high = self._survivors[upper - 1], self._survivors[upper]
        weight = at_high + (at_low - at_high) * (high - num_tokens) / (high - low)
        area = self._survived[upper] + (high - num_tokens) * (weight + at_high) / 2
        return weight, area

    def _sum_up(self) -> None:
        """Rebuild both sums from the longest length down; queries use them until the next output
        ends."""
        num_edges = len(EDGES)
        self._survivors = [0.0] * num_edges
        self._survived = [0.0] * num_edges
        prior = self._unit / math.log2(LONGEST_TOKENS + 1)
        survived = above = 0.0
        for index in range(num_edges - 2, -1, -1):
            weight = self._weights[index] + prior * _PRIOR[index]
            survived += _WIDTHS[index] * (above + weight / 2)
            above += weight
            self._survivors[index], self._survived[index] = above, survived
        self._is_stale = False


def predicted_peak_blocks(
    current: Iterable[tuple[int, int, int]], block_size: int, num_groups: int = 1
) -> int:
    """Maximum number of blocks that these sequences will hold at once, if each grows as expected.

    `current` has (num_held_blocks, num_left_tokens, expected_remaining) of each sequence.
    num_held_blocks is summed over all groups, num_left_tokens is the number of free slots in these
    blocks, and expected_remaining the number of tokens still to append. The caller corrects for
    shared blocks.

    All grow by a token a step, and a sequence frees all its blocks when it ends. So memory peaks
    just before one ends: with the remaining lengths in falling order, when the i-th ends, the first
    i are running and each has grown by its remaining length. Held blocks that are still empty are
    reserves, which other sequences may take; they count only once they are written to.
    """
    peak = num_held = 0
    tails: list[int] = []  # sorted slots left in the last block of each running sequence
    for held, num_left, remaining in sorted(current, key=_remaining, reverse=True):
        num_empty, num_tail_slots = divmod(num_left, block_size)
        num_held += held - num_empty * num_groups
        insort(tails, num_tail_slots)
        # In `remaining` steps each sequence fills num_whole blocks, and one more if the rest
        # exceeds its slots left.
        num_whole, rest = divmod(remaining, block_size)
        num_grown = num_whole * len(tails) + bisect_left(tails, rest)
        peak = max(peak, num_held + num_grown * num_groups)
    return peak


def _remaining(entry: tuple[int, int, int]) -> int:
    return entry[2]
