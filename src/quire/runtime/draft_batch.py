"""Builds the input tensors of a drafter's runs from the rows of the model.

The rows' tokens and block tables are those of `batch.RowBatch`; a run computes any span of a row's
tokens. The buffers of a run are not those of the model's steps, which stay valid.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.interface import AttentionBatch, GroupBatch
from quire.runtime.batch import NO_LINES, RowBatch, StepBatch, state_batch
from quire.runtime.block_tables import Int32, Int64
from quire.runtime.token_pairs import TokenPairs


@dataclass(frozen=True, slots=True)
class _Singles:
    """The arrays of consecutive runs in which the same rows compute one token each."""

    rows: Int64
    #: [R]: the index of each row's first token in the flattened token ids.
    token_base: Int64
    #: [R]: the index of each row's first entry in a group's flattened block table.
    table_base: Int64
    context_lens: Int32
    batch: StepBatch


MAX_SINGLES = 8
"""Maximum number of sets of rows whose arrays are kept."""


class DraftBatch:
    """Builds runs over the rows of `rows`; a run is valid until the next one is built."""

    def __init__(self, rows: RowBatch, vocab_size: int, pairs: TokenPairs | None = None) -> None:
        """`vocab_size` is the drafter's. In place of a token beyond it, token 0 is computed.
        `pairs` maps the model's token ids to the drafter's; None if both have the same ids."""
        self._rows = rows
        self._vocab_size = vocab_size
        self._pairs = pairs
        count, num_groups = rows.max_num_tokens, rows.tables.num_token_groups
        self._tables = rows.tables.views[:num_groups]
        self._input_ids: Int64 = np.zeros(count, np.int64)
        self._positions: Int64 = np.zeros(count, np.int64)
        self._slots: list[Int64] = [np.zeros(count, np.int64) for _ in range(num_groups)]
        self._singles: dict[bytes, _Singles] = {}

    def spans(self, rows: Int64, firsts: Int64, counts: Int64) -> StepBatch:
        """A run in which row i computes counts[i] tokens from position firsts[i] on.

        Rows that compute one token come first. The tokens are at most `max_num_tokens` in sum.
        """
        start = 0
        for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            span, positions = slice(start, start + count), np.arange(first, first + count)
            self._put_inputs(span, self._rows.token_ids[row, first : first + count])
            self._positions[span] = positions
            base = self._rows.tables.base(np.array([row]))
            self._rows.tables.fill_slots(self._slots, span, base, positions)
            start += count
        context_lens = (firsts + counts).astype(np.int32)
        num_decodes = int(np.count_nonzero(counts == 1))
        return self._batch(rows, counts, context_lens, num_decodes)

    def singles(self, rows: Int64, positions: Int64) -> StepBatch:
        """A run in which row i computes its token at positions[i]. Arrays of the last runs with the
        same rows are used again."""
        kept = self._singles.get(rows.tobytes())
        if kept is None:
            kept = self._keep(rows.copy())
        count = len(rows)
        self._positions[:count] = positions
        token_ids = self._rows.token_ids.reshape(-1)[kept.token_base + positions]
        self._put_inputs(slice(count), token_ids)
        self._rows.tables.fill_slots(self._slots, slice(count), kept.table_base, positions)
        kept.context_lens[:] = positions + 1
        lens_list = kept.context_lens.tolist()
        kept.batch.attention.context_lens_list = lens_list
        kept.batch.states.context_lens_list = lens_list
        return kept.batch

    def _put_inputs(self, span: slice, token_ids: Int32) -> None:
        if self._pairs is not None:
            token_ids = self._pairs.stand_ins[token_ids]
        elif int(token_ids.max()) >= self._vocab_size:
            token_ids = np.where(token_ids < self._vocab_size, token_ids, 0)
        self._input_ids[span] = token_ids

    def _keep(self, rows: Int64) -> _Singles:
        context_lens = np.zeros(len(rows), np.int32)
        batch = self._batch(rows, np.ones(len(rows), np.int64), context_lens, len(rows))
        if len(self._singles) == MAX_SINGLES:
            self._singles.clear()
        kept = self._singles[rows.tobytes()] = _Singles(
            rows,
            rows * self._rows.token_ids.shape[1],
            self._rows.tables.base(rows),
            context_lens,
            batch,
        )
        return kept

    def _batch(
        self, rows: Int64, counts: Int64, context_lens: Int32, num_decodes: int
    ) -> StepBatch:
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        attention = AttentionBatch(
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens),
            rows=torch.from_numpy(rows),
            query_lens_list=counts.tolist(),
            context_lens_list=context_lens.tolist(),
            rows_list=rows.tolist(),
            num_decodes=num_decodes,
            groups=tuple(
                GroupBatch(table, torch.from_numpy(slots[:num_tokens]))
                for table, slots in zip(self._tables, self._slots, strict=True)
            ),
        )
        return StepBatch(
            token_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            attention=attention,
            states=state_batch(attention, ()),
            rows=rows,
            num_new_tokens=counts,
            sample_rows=rows,
            sample_index=torch.from_numpy(query_start[1:].astype(np.int64) - 1),
            joined_lines=NO_LINES,
            prompt_logprob_spans=[],
        )
