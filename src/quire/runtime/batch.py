"""StepPlan -> the tensors of one step, built from permanent rows into preallocated buffers.

One row per live sequence keeps its tokens, counts and block tables; a plan edits them and names the
rows that compute other than one token. Everything per row is a numpy operation over all rows: the
only Python loops run over what changed in this step. Knows no requests, no text and no model.

Legend: R rows, S sequences of the step, T tokens of the step, G KV groups, B block size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, GroupBatch
from quire.core.step import EditKind, RowAdmission, StepPlan, TableEdit
from quire.sampling.history import TokenHistory

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepBatch:
    """One step as tensors; valid until the next `build`.

    rows: [S], the row of each sequence, decoding ones first. num_new_tokens: [S].
    sample_rows: the rows that close their gap in this step; sample_index: for each of them, the
        token of the step whose hidden state predicts its next token.
    prompt_logprob_spans: (row, first token of the step, count, index of the first predicted token)
        for the rows that want log-probabilities of the prompt tokens that follow these positions.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    rows: Int64
    num_new_tokens: Int64
    sample_rows: Int64
    sample_index: torch.Tensor
    prompt_logprob_spans: list[tuple[int, int, int, int]]


class RowBatch:
    """The permanent rows.

    Invariant: for a live row, token_ids[row, :num_tokens[row]] are its tokens, K and V of the first
    num_computed[row] of them are in the blocks of its tables, and every table entry up to
    table_lens is a block id or a hole.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        num_groups: int,
        block_size: int,
    ) -> None:
        """max_num_tokens: the most that one step computes."""
        # One column more than max_model_len: the last sampled token is stored, never computed.
        self.token_ids: Int32 = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_tokens: Int32 = np.zeros(num_rows, np.int32)
        self.num_prompt_tokens: Int32 = np.zeros(num_rows, np.int32)
        self.num_computed: Int64 = np.zeros(num_rows, np.int64)
        self.history = TokenHistory(self.token_ids, self.num_tokens)
        self.is_live = np.zeros(num_rows, np.bool_)
        self.wants_prompt_logprobs = np.zeros(num_rows, np.bool_)
        max_blocks = -(-max_model_len // block_size)
        self._tables = [np.zeros((num_rows, max_blocks), np.int32) for _ in range(num_groups)]
        self._table_views = [torch.from_numpy(table) for table in self._tables]
        self._table_lens = [np.zeros(num_rows, np.int64) for _ in range(num_groups)]
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._input_ids: Int64 = np.zeros(max_num_tokens, np.int64)
        self._positions: Int64 = np.zeros(max_num_tokens, np.int64)
        self._slots: list[Int64] = [np.zeros(max_num_tokens, np.int64) for _ in range(num_groups)]
        self._is_named = np.zeros(num_rows, np.bool_)

    # ---- the plan's changes -----------------------------------------------------------------

    def change(self, plan: StepPlan) -> None:
        """Carry out release, admit and table_edits."""
        for row in plan.release:
            assert self.is_live[row], f"row {row} is released but was not live"
            self.is_live[row] = self.wants_prompt_logprobs[row] = False
        for admission in plan.admit:
            self._admit(admission)
        for edit in plan.table_edits:
            self._edit(edit)
        num_live = int(np.count_nonzero(self.is_live))
        assert num_live == plan.num_rows, f"{num_live} live rows, but the plan has {plan.num_rows}"

    def _admit(self, admission: RowAdmission) -> None:
        row = admission.row
        assert not self.is_live[row], f"row {row} is admitted but was live"
        count = len(admission.token_ids)
        self.token_ids[row, :count] = admission.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = admission.num_prompt_tokens
        self.num_computed[row] = admission.num_computed_tokens
        self.wants_prompt_logprobs[row] = admission.params.prompt_logprobs is not None
        self.is_live[row] = True
        for group, blocks in enumerate(admission.block_tables):
            self._tables[group][row, : len(blocks)] = blocks
            self._table_lens[group][row] = len(blocks)

    def _edit(self, edit: TableEdit) -> None:
        table, lengths = self._tables[edit.group][edit.row], self._table_lens[edit.group]
        first, last = edit.first_logical_block, edit.first_logical_block + len(edit.block_ids)
        if edit.kind is EditKind.CUT:
            lengths[edit.row] = first
            computed = self.num_computed
            computed[edit.row] = min(int(computed[edit.row]), first << self._shift)
            return
        if edit.kind is EditKind.APPEND:
            assert first == lengths[edit.row], f"{edit} does not append at {lengths[edit.row]}"
            lengths[edit.row] = last
        assert last <= lengths[edit.row], f"{edit} goes beyond {lengths[edit.row]} blocks"
        table[first:last] = edit.block_ids

    def reset(self) -> None:
        """Drop all rows."""
        self.is_live[:] = self.wants_prompt_logprobs[:] = False

    # ---- the step's tensors -----------------------------------------------------------------

    def build(self, plan: StepPlan) -> StepBatch:
        """The tensors of the step, and the rows' num_computed moved on past it."""
        rows, counts, num_decodes = self._step_rows(plan)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        assert num_tokens == plan.num_tokens, f"{num_tokens} tokens, the plan has {plan.num_tokens}"
        self._fill_decodes(rows[:num_decodes])
        for index in range(num_decodes, len(rows)):
            self._fill_chunk(int(rows[index]), int(query_start[index]), int(counts[index]))
        computed = self.num_computed[rows] + counts
        assert (computed <= self.num_tokens[rows]).all(), "a row computes beyond its tokens"
        spans = self._prompt_logprob_spans(rows, query_start, counts)
        self.num_computed[rows] = computed
        closes = computed == self.num_tokens[rows]
        return StepBatch(
            token_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            attention=self._attention_batch(rows, query_start, counts, computed, num_decodes),
            rows=rows,
            num_new_tokens=counts,
            sample_rows=rows[closes],
            sample_index=torch.from_numpy(query_start[1:][closes].astype(np.int64) - 1),
            prompt_logprob_spans=spans,
        )

    def append_sampled(self, rows: Int64, token_ids: Int64) -> None:
        """Store what was sampled: these are the next inputs of their rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def _step_rows(self, plan: StepPlan) -> tuple[Int64, Int64, int]:
        """Rows that compute, tokens of each, and how many of them (the first) decode."""
        named = [chunk.row for chunk in plan.chunks]
        self._is_named[named] = True
        decodes = np.flatnonzero(self.is_live & ~self._is_named)
        self._is_named[named] = False
        chunks = [chunk for chunk in plan.chunks if chunk.num_new_tokens]
        rows = np.concatenate([decodes, np.array([chunk.row for chunk in chunks], np.int64)])
        counts = np.ones(len(rows), np.int64)
        counts[len(decodes) :] = [chunk.num_new_tokens for chunk in chunks]
        return rows, counts, len(decodes)

    def _fill_decodes(self, rows: Int64) -> None:
        count = len(rows)
        positions = self.num_computed[rows]
        self._positions[:count] = positions
        self._input_ids[:count] = self.token_ids[rows, positions]
        for slots, table in zip(self._slots, self._tables, strict=True):
            blocks = table[rows, positions >> self._shift].astype(np.int64)
            slots[:count] = (blocks << self._shift) + (positions & self._mask)

    def _fill_chunk(self, row: int, start: int, count: int) -> None:
        first = int(self.num_computed[row])
        positions = np.arange(first, first + count)
        span = slice(start, start + count)
        self._positions[span] = positions
        self._input_ids[span] = self.token_ids[row, first : first + count]
        for slots, table in zip(self._slots, self._tables, strict=True):
            blocks = table[row, positions >> self._shift].astype(np.int64)
            slots[span] = (blocks << self._shift) + (positions & self._mask)

    def _attention_batch(
        self,
        rows: Int64,
        query_start: Int32,
        counts: Int64,
        computed: Int64,
        num_decodes: int,
    ) -> AttentionBatch:
        """The block tables go in whole, as views: no copy here grows with the context."""
        num_tokens = int(query_start[-1])
        groups = tuple(
            GroupBatch(
                block_tables=table,
                slot_mapping=torch.from_numpy(slots[:num_tokens]),
            )
            for table, slots in zip(self._table_views, self._slots, strict=True)
        )
        return AttentionBatch(
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(computed.astype(np.int32)),
            rows=torch.from_numpy(rows),
            query_lens_list=counts.tolist(),
            context_lens_list=computed.tolist(),
            rows_list=rows.tolist(),
            num_decodes=num_decodes,
            groups=groups,
        )

    def _prompt_logprob_spans(
        self, rows: Int64, query_start: Int32, counts: Int64
    ) -> list[tuple[int, int, int, int]]:
        spans: list[tuple[int, int, int, int]] = []
        if not self.wants_prompt_logprobs.any():
            return spans
        for index in np.flatnonzero(self.wants_prompt_logprobs[rows]):
            row = int(rows[index])
            first = int(self.num_computed[row])
            # Position p predicts token p + 1; the prompt's last position predicts no prompt token.
            count = min(int(counts[index]), int(self.num_prompt_tokens[row]) - 1 - first)
            if count > 0:
                spans.append((row, int(query_start[index]), count, first + 1))
        return spans
