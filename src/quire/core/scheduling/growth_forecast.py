"""Predicts whether a sequence will fit beside the running sequences as all of them grow.

Used by the capacity check, with predicted output lengths.
"""

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.output_length import OutputLengthPredictor, predicted_peak_blocks
from quire.core.scheduling.running_set import RunningSet
from quire.core.sequence import Sequence


class GrowthForecast:
    """The blocks that the running sequences, and one more, are predicted to need.

    Invariant: `_growth` and `_num_shared` describe the running sequences as of `_predicted_at`,
    which is (step, number of running sequences).
    """

    def __init__(
        self, memory: KVCacheManager, running_set: RunningSet, lengths: OutputLengthPredictor
    ) -> None:
        self.lengths = lengths
        #: Id of the step that is being planned; the prediction is computed once per step.
        self.step_id = 0
        self._memory = memory
        self._running_set = running_set
        self._predicted_at = (-1, -1)
        # Blocks held, free slots and tokens to come of each running sequence.
        self._growth: list[tuple[int, int, int]] = []
        # Number of blocks that `_growth` counts too many, since several sequences hold them.
        self._num_shared = 0

    def fits_later(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Whether this sequence, with num_new_blocks more, will fit beside the running sequences as
        all grow.

        The prediction counts a shared block once for each holder; this method subtracts the
        surplus.
        """
        memory, running = self._memory, self._running_set.running
        if not memory.num_blocks_to_grow or self._fit_all(sequence):
            return True
        if self._predicted_at != (self.step_id, len(running)):
            self._predicted_at = self.step_id, len(running)
            self._growth = self._predict_growth(running)
            num_held = sum([memory.growth.num_held(other.block_tables) for other in running])
            self._num_shared = num_held - memory.pool.num_held
        size, growth = memory.block_size, memory.growth
        num_slots = -(-len(sequence.token_ids) // size) * size
        remaining = self.num_remaining(sequence)
        num_bounded = growth.bounded_blocks(sequence.num_tokens + remaining)
        entry = (num_new_blocks + num_bounded, num_slots - len(sequence.token_ids), remaining)
        entries = [*self._growth, entry]
        peak = predicted_peak_blocks(entries, size, len(growth.unbounded))
        return peak - max(0, self._num_shared) <= memory.pool.num_blocks

    def num_remaining(self, sequence: Sequence) -> int:
        """The predicted number of tokens that the sequence will still generate."""
        num_prompt = sequence.num_prompt_tokens
        limit = sequence.max_num_tokens - num_prompt
        return self.lengths.expected_remaining(sequence.num_tokens - num_prompt, limit)

    def num_all_remaining(self) -> int:
        """The predicted number of tokens that the running sequences will still generate."""
        outputs = [
            (
                sequence.num_tokens - sequence.num_prompt_tokens,
                sequence.max_num_tokens - sequence.num_prompt_tokens,
            )
            for sequence in self._running_set.running
        ]
        return sum(self.lengths.all_expected_remaining(outputs))

    def _fit_all(self, sequence: Sequence) -> bool:
        """Whether there are enough blocks even if all sequences grow to their limits.

        Then the much slower forecast is not needed.
        """
        nums_tokens = [other.max_num_tokens for other in self._running_set.running]
        nums_tokens.append(sequence.max_num_tokens)
        num_blocks = self._memory.growth.all_most_blocks(nums_tokens)
        return num_blocks <= self._memory.pool.num_blocks

    def _predict_growth(self, running: list[Sequence]) -> list[tuple[int, int, int]]:
        """Blocks held, free slots and tokens to come of each sequence; see `predicted_peak_blocks`.

        Computed for all sequences together, since many may run.
        """
        size, growth = self._memory.block_size, self._memory.growth
        num_groups = len(growth.unbounded)
        counts: list[int] = []
        outputs: list[tuple[int, int]] = []
        for sequence in running:
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            counts.append(num_tokens)
            num_prompt = sequence.num_prompt_tokens
            outputs.append((num_tokens - num_prompt, sequence.max_num_tokens - num_prompt))
        remaining = self.lengths.all_expected_remaining(outputs)
        expected: list[tuple[int, int, int]] = []
        for sequence, count, to_come in zip(running, counts, remaining, strict=True):
            num_slots = sequence.num_slots
            if growth.bounded:  # count full groups by tokens; windows and states have a bound
                num_slots = max(num_slots, -(-count // size) * size)
            num_held = num_groups * (num_slots // size) + growth.bounded_blocks(count + to_come)
            expected.append((num_held, max(0, num_slots - count), to_come))
        return expected
