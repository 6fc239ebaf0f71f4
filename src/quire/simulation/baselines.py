"""Simpler policies to compare with: preemption of whole sequences, admission without forecast."""

from collections.abc import Iterable

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.output_length import OutputLengthPredictor
from quire.core.sequence import Sequence


class WholePreemption(KVCacheManager):
    """Frees all blocks of a preempted sequence, instead of only the needed number of blocks."""

    def release_tail(self, sequence: Sequence, num_kept: int, num_wanted: int) -> int:
        """See `KVCacheManager`."""
        return self.truncate(sequence, 0)


class NoGrowth(OutputLengthPredictor):
    """Expects no sequence to grow, so that a sequence is admitted if it fits now."""

    def all_expected_remaining(self, outputs: Iterable[tuple[int, int]]) -> list[int]:
        """See `OutputLengthPredictor`."""
        return [0 for _ in outputs]
