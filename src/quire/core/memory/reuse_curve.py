"""What is learned about reuse: how likely a content is to be asked for again, by its age.

Contents come in two classes: not reused so far, and reused at least once. Ages are counted in
*epochs* (a fixed number of evictions: a clock that only memory pressure moves) and binned by
octaves, [0, 1), [1, 2), [2, 4), ... epochs. A curve says for each class and bin which part of the
contents that reached the bin unused was reused within it: a life table, as actuaries keep it.
Knows no blocks; used by `eviction` alone.
"""

from collections import deque

NUM_CLASSES = 2
NUM_BINS = 9
MAX_AGE = 1 << (NUM_BINS - 1)
"""Epochs after which a sample counts as not reused."""

PRIOR = (0.1, 0.3)
"""Assumed part reused in every bin, by class. Equal parts in octaves mean a rate that falls as
1 / age, so before anything is learned each class is in the order of its last use."""
PRIOR_WEIGHT = 8.0
"""The prior counts as much as so many observed contents."""
HALF_LIFE = 256
"""Epochs after which what was observed counts half."""


def bin_of(age: int) -> int:
    """The bin of an age in epochs; the last one is open."""
    return min(age.bit_length(), NUM_BINS - 1)


class ReuseCurve:
    """Samples of unused contents by class and epoch, and the reuse that followed.

    Invariant: `_waiting[-1 - age][c]` samples of class c are `age` epochs old and neither reused
    nor dropped; each was counted once in `_reached[c]` of every bin up to that of its age.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._waiting: deque[list[int]] = deque([[0] * NUM_CLASSES], maxlen=MAX_AGE + 1)
        self._reached = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._reused = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]

    def start(self, reuse_class: int) -> None:
        """A sampled content of that class was used just now."""
        self._waiting[-1][reuse_class] += 1
        self._reached[reuse_class][0] += 1

    def reused(self, reuse_class: int, epoch: int) -> None:
        """A sample that was started at `epoch`, at most MAX_AGE epochs ago, is used again."""
        age = self.epoch - epoch
        self._waiting[-1 - age][reuse_class] -= 1
        self._reused[reuse_class][bin_of(age)] += 1

    def next_epoch(self) -> None:
        """Everything grows older by one epoch. O(NUM_BINS)."""
        self.epoch += 1
        self._waiting.append([0] * NUM_CLASSES)
        for index in range(1, NUM_BINS):
            age = 1 << (index - 1)
            if age < len(self._waiting):
                for reached, waiting in zip(self._reached, self._waiting[-1 - age], strict=True):
                    reached[index] += waiting
        if self.epoch % HALF_LIFE == 0:
            self._reached = [[value / 2 for value in row] for row in self._reached]
            self._reused = [[value / 2 for value in row] for row in self._reused]

    def densities(self) -> list[list[float]]:
        """Hits to be expected for each epoch that a block stays, by class and bin of its age.

        The best over all bins up to which it may stay (a Gittins index): a content whose reuse is
        due only after a while is worth keeping until then. Cf. Beckmann, Chen, Cidon, "LHD", NSDI
        2018, section 3, which takes the mean over the whole life instead.
        """
        return [
            [_density(parts, first) for first in range(NUM_BINS)]
            for parts in (self._parts_reused(index) for index in range(NUM_CLASSES))
        ]

    def _parts_reused(self, reuse_class: int) -> list[float]:
        prior = PRIOR[reuse_class] * PRIOR_WEIGHT
        return [
            (reused + prior) / (reached + PRIOR_WEIGHT)
            for reused, reached in zip(
                self._reused[reuse_class], self._reached[reuse_class], strict=True
            )
        ]


def _density(parts: list[float], first: int) -> float:
    """The best ratio of hits to epochs of stay over bins first..last, for any last."""
    best = num_hits = num_epochs = 0.0
    left = 1.0
    for index in range(first, NUM_BINS):
        width = 1 << max(index - 1, 0)
        num_hits += left * parts[index]
        num_epochs += left * width * (1 - parts[index] / 2)  # a hit comes in mid-bin on average
        left *= 1 - parts[index]
        best = max(best, num_hits / num_epochs)
    return best
