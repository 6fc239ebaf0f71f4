"""Measures peak memory at start-up, by running the steps that take the most memory.

The first step computes the largest number of prompt tokens, and may be captured as a CUDA graph,
whose memory stays in use. So the second step computes the largest number that is launched kernel by
kernel beside that graph: with prompt log-probabilities, which are never captured, or to capture the
next size. The third step decodes with all rows. In these steps, every row ends at the longest
context and samples with all options that take memory. The last step mixes a chunk of two prompt
tokens with decoding rows. It takes little memory, but compiles kernels for which the first request
would otherwise wait. If steps have no room for prompt tokens, only the third is run.

All rows have the same tokens and share a few blocks, so a tiny pool suffices: the rows write the
same K and V to the same slots, and overwrite each other's states. The sampled tokens are dropped.
Called by `assembly.device_memory_plan`.
"""

from dataclasses import dataclass

from quire.core.kv_groups import KVGroup
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, Runner, StepPlan
from quire.runtime.calibration import RunnerShape
from quire.runtime.graphs import mixed_graph_sizes


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """The steps that take the most memory, for one runner."""

    #: The runner's sizes. Their `num_blocks` is not used.
    shape: RunnerShape
    #: The most log-probabilities per token that a request may ask for.
    max_logprobs: int
    #: Whether the model predicts tokens; otherwise all rows pool.
    generates: bool = True

    @property
    def num_blocks(self) -> int:
        """The number of KV blocks that the steps use: enough for the longest chunk and one
        state."""
        return sum(map(self._num_used, self.shape.groups))

    def run(self, runner: Runner) -> None:
        """Run all steps. The runner must have no rows, and has none afterwards."""
        try:
            for plan in self.plans():
                runner.execute(plan)
                runner.sample()
                runner.result()
        finally:
            runner.reset()

    def plans(self) -> list[StepPlan]:
        """The largest step of prompts, the largest beside its graph, the step of decodes and the
        mixed step. Only the step of decodes if there is no room for prompts."""
        num_rows, most = self.shape.num_rows, self.shape.max_num_tokens
        steps = [[1] * num_rows]
        if most > num_rows and self._length > 1:
            beside = most if self.generates else max([num_rows, *mixed_graph_sizes(most)[-2:-1]])
            steps[:0] = [self._chunks(most), self._chunks(beside)]
            steps.append([2] + [1] * (num_rows - 1))
        return [
            StepPlan(
                step_id=index + 1,
                num_rows=num_rows,
                num_tokens=sum(sizes),
                release=tuple(range(num_rows)) if index else (),
                admit=self._admissions(sizes, prompt_logprobs=index == 1 and len(steps) > 1),
                chunks=tuple(Chunk(row, size) for row, size in enumerate(sizes) if size > 1),
            )
            for index, sizes in enumerate(steps)
        ]

    @property
    def _length(self) -> int:
        """The number of tokens of a row before it samples."""
        return self.shape.max_model_len - 1

    def _num_used(self, group: KVGroup) -> int:
        """The number of different blocks in the group's tables. Each table repeats them in a
        cycle."""
        # One block more than the chunk's length needs, since the chunk may begin in the middle of a
        # block.
        longest = -(-self._chunks(self.shape.max_num_tokens)[0] // self.shape.block_size) + 1
        length = self.shape.table_length(group, self.shape.max_model_len)
        return length if group.num_state_blocks else min(longest, length)

    def _chunks(self, num_tokens: int) -> list[int]:
        """The number of prompt tokens of each row, `num_tokens` in all if rows are long enough.

        The first row has most of them, since prompt log-probabilities of many positions of a row
        are computed at once.
        """
        left = num_tokens
        chunks: list[int] = []
        for row in range(self.shape.num_rows):
            num_others = self.shape.num_rows - row - 1
            chunks.append(min(left - num_others, self._length))
            left -= chunks[-1]
        return chunks

    def _admissions(self, chunks: list[int], *, prompt_logprobs: bool) -> tuple[RowAdmission, ...]:
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
                self._params(prompt_logprobs=prompt_logprobs and row == 0),
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
