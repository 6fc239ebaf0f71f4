"""What the scheduler remembers of a step until its result comes, and what it takes from that for
the memory: blocks that are filled now, and the log-probabilities of prompts.

Used by `scheduler` alone.
"""

from dataclasses import dataclass, field

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import StepResult


@dataclass(slots=True)
class StepInFlight:
    """What `apply` needs to know of a step.

    rows: row -> (who was in it, its num_admissions then, tokens written when the step has ended).
    num_sampling: how many of them close their gap and so must come back with a token.
    """

    step_id: int
    rows: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    num_tokens: int = 0
    num_sampling: int = 0

    def take_in(self, result: StepResult, memory: KVCacheManager) -> None:
        """Publish the blocks that the step filled, and keep the log-probabilities of prompts."""
        for row, prompt_logprobs in result.prompt_logprobs.items():
            sequence, num_admissions, _ = self.rows[row]
            is_current = sequence.num_admissions == num_admissions and row not in result.failed
            # Whoever was preempted in the middle of its prompt computes these positions again.
            is_kept = sequence.state is not SequenceState.PREEMPTED or sequence.num_pending_tokens
            if is_current and is_kept and sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs.extend(prompt_logprobs)
        block_size, failed, running = memory.block_size, result.failed, SequenceState.RUNNING
        for row, (sequence, num_admissions, num_written) in self.rows.items():
            if (
                sequence.state is not running
                or sequence.num_admissions != num_admissions
                or row in failed
            ):
                continue
            sequence.num_written_tokens = num_written
            if num_written >= (sequence.num_published_blocks + 1) * block_size:
                memory.publish(sequence, num_written)
