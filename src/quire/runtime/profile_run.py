"""Runs the steps that take the most memory, to measure it.

One computes as many prompt tokens as a step may, one decodes with all rows; in all of them every
row ends at the longest context and samples with every option that takes memory. A third, where
there is room for it, has the shortest chunk beside decodes: it takes little, but has kernels
compiled that the first request would wait for. All rows hold the same tokens and the same few
blocks, again and again, so that the pool may be tiny: they write the same K and V to the same
places, and spoil each other's states. What they sample is dropped. Called by
`assembly/device_memory_plan.py`.
"""

from dataclasses import dataclass

from quire.core.kv_groups import KVGroup
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, Runner, StepPlan
from quire.runtime.calibration import RunnerShape


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """shape: of the runner; its num_blocks is not used here. max_logprobs: the most that
    a request may ask for. generates: whether the model predicts tokens; else all rows pool."""

    shape: RunnerShape
    max_logprobs: int
    generates: bool = True

    @property
    def num_blocks(self) -> int:
        """KV blocks that the steps use: those that the longest chunk lies in, and one state."""
        return sum(map(self._num_used, self.shape.groups))

    def run(self, runner: Runner) -> None:
        """All of them. The runner must have no rows, and has none afterwards."""
        try:
            for plan in self.plans():
                runner.execute(plan)
                runner.sample()
                runner.result()
        finally:
            runner.reset()

    def plans(self) -> list[StepPlan]:
        """The prompts' step, the decoding one, the mixed one."""
        num_rows = self.shape.num_rows
        steps = [self._chunks(), [1] * num_rows]
        if self.shape.max_num_tokens > num_rows and self._length > 1:
            steps.append([2] + [1] * (num_rows - 1))
        return [
            StepPlan(
                step_id=index + 1,
                num_rows=num_rows,
                num_tokens=sum(sizes),
                release=tuple(range(num_rows)) if index else (),
                admit=self._admissions(sizes),
                chunks=tuple(Chunk(row, size) for row, size in enumerate(sizes) if size > 1),
            )
            for index, sizes in enumerate(steps)
        ]

    @property
    def _length(self) -> int:
        """Tokens of a row before it samples."""
        return self.shape.max_model_len - 1

    def _num_used(self, group: KVGroup) -> int:
        """Blocks of the group's tables, which name them in turn."""
        # One more than whole blocks: the chunk may begin in the middle of one.
        longest = -(-self._chunks()[0] // self.shape.block_size) + 1
        length = self.shape.table_length(group, self.shape.max_model_len)
        return length if group.num_state_blocks else min(longest, length)

    def _chunks(self) -> list[int]:
        """Prompt tokens of each row: most of them the first one's, for prompt log-probabilities
        are made of many positions at once."""
        left = self.shape.max_num_tokens
        chunks: list[int] = []
        for row in range(self.shape.num_rows):
            num_others = self.shape.num_rows - row - 1
            chunks.append(min(left - num_others, self._length))
            left -= chunks[-1]
        return chunks

    def _admissions(self, chunks: list[int]) -> tuple[RowAdmission, ...]:
        token_ids = [place % self.shape.vocab_size for place in range(self._length)]
        tables: list[tuple[int, ...]] = []
        first = 0
        for group in self.shape.groups:
            length = self.shape.table_length(group, self.shape.max_model_len)
            num_used = self._num_used(group)
            tables.append(tuple(first + logical % num_used for logical in range(length)))
            first += num_used
        return tuple(
            RowAdmission(
                row,
                token_ids,
                self._length,
                self._length - size,
                tuple(tables),
                self._params(prompt_logprobs=row == 0 and size > 1),
            )
            for row, size in enumerate(chunks)
        )

    def _params(self, *, prompt_logprobs: bool) -> DecodingParams:
        if not self.generates:
            return DecodingParams(max_tokens=1, pooling=PoolingParams())
        return DecodingParams(
            max_tokens=2,
            top_p=0.9,
            top_k=self.shape.vocab_size // 2,
            min_p=0.01,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            repetition_penalty=1.1,
            logprobs=self.max_logprobs,
            prompt_logprobs=self.max_logprobs if prompt_logprobs else None,
        )
