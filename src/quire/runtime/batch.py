"""Builds the input tensors of a step from its StepPlan.

Each live sequence has a row in preallocated arrays, which hold its tokens, counts and block tables
from step to step. A plan lists edits of rows, and the rows that do not compute exactly one token. A
row's gap is its number of tokens that are not computed yet; if a step closes the gap, the row
samples its next token. Work per row is done by numpy operations over all rows; Python loops run
only over the changes of the step.

Legend: R rows, S sequences of the step, T tokens of the step, G KV groups of tokens, B block size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, GroupBatch
from quire.core.content_spans import ContentSpan, spans_between
from quire.core.step import EditKind, RowAdmission, RowFork, StepPlan, TableEdit, TokenEdit
from quire.layers.rotary import AxisRotations
from quire.models.interface import InputEmbeds
from quire.recurrence.state_backend import StateBatch
from quire.runtime.block_tables import BlockTables, Int32, Int64
from quire.runtime.contents.axis_positions import AxisPositions
from quire.runtime.drafts import StepDrafts, find_drafts
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.sampler import PendingSample

NO_LINES = torch.zeros(0, dtype=torch.int64)


class ContentPiece(NamedTuple):
    """Consecutive tokens of a step that read embeddings of one content."""

    digest: str
    #: Index of the first embedding that is read.
    first: int
    num_tokens: int
    #: Index of the first token in the step.
    place: int


@dataclass(slots=True)
class StepBatch:
    """One step as tensors; valid until the next `build`."""

    token_ids: torch.Tensor
    #: [T] int64, the index of each token's row in the rotary tables: the token's position, unless
    #: the model has `axis_rotations`.
    positions: torch.Tensor
    attention: AttentionBatch
    states: StateBatch
    #: [S]: the row of each sequence; decoding rows come first.
    rows: Int64
    #: [S]: the tokens that each sequence computes in this step.
    num_new_tokens: Int64
    #: The rows that close their gap in this step and so sample a token.
    sample_rows: Int64
    #: For each sample row, the index of the step's token whose hidden state predicts the next. It
    #: is the row's last token that is not a draft.
    sample_index: torch.Tensor
    #: For each new fork, the index of its source row in `sample_rows`. The forks are the last of
    #: `sample_rows`: they compute nothing, and sample from the hidden state of the source row.
    joined_lines: torch.Tensor
    #: (row, first token of the step, count, index of the first predicted token) for each row that
    #: needs log-probabilities of the prompt tokens that follow these positions.
    prompt_logprob_spans: list[tuple[int, int, int, int]]
    #: If not 0, the model and the attention read tensors that are reused by all steps of at most
    #: this number of tokens; missing tokens are replaced by padding. Such a step may be captured
    #: once and replayed. Each token is a decoding sequence, or `attention.mixed` has the plan of
    #: the step. 0 means that the tensors are this step's own.
    static_size: int = 0
    #: Writes the token ids into `token_ids`. It must be called once before they are read, and may
    #: be captured with their reader. None means that `token_ids` has the ids already.
    gather: Callable[[], None] | None = None
    #: The tokens that read embeddings of contents, in ascending order. There are none in steps of a
    #: static size.
    content_pieces: Sequence[ContentPiece] = ()
    #: The embeddings of `content_pieces`, which the runner adds. None if all inputs are the
    #: embeddings of token ids.
    input_embeds: InputEmbeds | None = None
    #: None if the step verifies no drafts.
    drafts: StepDrafts | None = None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Arrays and tensors reused by consecutive steps in which the same rows decode and no other row
    computes."""

    #: The live rows that compute nothing.
    paused: tuple[int, ...]
    #: [S]: the decoding rows.
    rows: Int64
    #: [S]: the index of each row's first token in the flattened `token_ids`.
    token_base: Int64
    #: [S]: the index of each row's first entry in a group's flattened block table.
    table_base: Int64
    #: [S]: updated at every step, like the buffers to which `step` refers.
    context_lens: Int32
    step: StepBatch


class RowBatch:
    """The rows of all live sequences, which last from step to step.

    Invariant: token_ids[row, :num_tokens[row]] are the tokens of a live row. The blocks in its
    tables hold K and V of the first num_computed[row] tokens, and the states after these tokens. A
    table entry is a block id, or -1 (a hole) if the window has passed the block.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        num_groups: int,
        block_size: int,
        state_sizes: Sequence[int] = (),
        axes: AxisRotations | None = None,
        content_token_id: int | None = None,
    ) -> None:
        """`num_groups` counts the KV groups of tokens. `state_sizes` has, for each group of states,
        the number of blocks of a state. Groups of states follow the groups of tokens. `axes` are
        the model's `axis_rotations`, and `content_token_id` is its attribute of this name."""
        #: Maximum number of tokens that one step computes.
        self.max_num_tokens = max_num_tokens
        # One column more than max_model_len: the last sampled token is stored, never computed.
        self.token_ids: Int32 = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_tokens: Int32 = np.zeros(num_rows, np.int32)
        self.num_prompt_tokens: Int32 = np.zeros(num_rows, np.int32)
        self.num_computed: Int64 = np.zeros(num_rows, np.int64)
        # The highest num_computed that a row had before table edits lowered it. Tokens before this
        # position must not be edited.
        self._num_computed_before_cuts: Int64 = np.zeros(num_rows, np.int64)
        self.history = TokenHistory(self.token_ids, self.num_tokens)
        self.is_live = np.zeros(num_rows, np.bool_)
        self.wants_prompt_logprobs = np.zeros(num_rows, np.bool_)
        #: The spans of contents of the live rows that have any.
        self.content_spans: dict[int, tuple[ContentSpan, ...]] = {}
        max_blocks = -(-max_model_len // block_size)
        self.tables = BlockTables(num_groups, num_rows, max_blocks, block_size, state_sizes)
        self._token_tables = self.tables.views[:num_groups]
        self._state_tables = tuple(self.tables.views[num_groups:])
        self._axes = AxisPositions(axes, num_rows)
        self.content_token_id = content_token_id
        self._block_size = block_size
        self._input_ids: Int64 = np.zeros(max_num_tokens, np.int64)
        self._positions: Int64 = np.zeros(max_num_tokens, np.int64)
        self._slots: list[Int64] = [np.zeros(max_num_tokens, np.int64) for _ in range(num_groups)]
        self._decodes: _Decodes | None = None  # None if it must be made for the current rows

    # ---- the plan's changes -----------------------------------------------------------------

    def change(self, plan: StepPlan) -> None:
        """Carry out release, admit, forks, token_edits and table_edits."""
        if plan.release or plan.admit or plan.forks:
            self._decodes = None
        for row in plan.release:
            assert self.is_live[row], f"row {row} is released but was not live"
            self.is_live[row] = self.wants_prompt_logprobs[row] = False
            self.content_spans.pop(row, None)
            self._axes.set_row(row, ())
        for admission in plan.admit:
            self._admit(admission)
        for fork in plan.forks:
            self._fork(fork)
        for token_edit in plan.token_edits:
            self._edit_tokens(token_edit)
        for table_edit in plan.table_edits:
            self._edit_table(table_edit)
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
        self._num_computed_before_cuts[row] = 0
        self.wants_prompt_logprobs[row] = admission.params.prompt_logprobs is not None
        self.is_live[row] = True
        if admission.content_spans:
            self.content_spans[row] = admission.content_spans
        self.tables.set_row(row, admission.block_tables)
        self._axes.set_row(row, admission.content_spans)

    def _fork(self, fork: RowFork) -> None:
        row, source = fork.row, fork.source_row
        assert not self.is_live[row], f"row {row} is forked into but was live"
        assert self.is_live[source], f"row {row} is forked from row {source}, which is not live"
        count = int(self.num_tokens[source])
        self.token_ids[row, :count] = self.token_ids[source, :count]
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = self.num_prompt_tokens[source]
        self.num_computed[row] = self.num_computed[source]
        self._num_computed_before_cuts[row] = 0
        # Only the source yields the prompt's log-probabilities, which are the same for the fork.
        self.wants_prompt_logprobs[row] = False
        self.is_live[row] = True
        if source in self.content_spans:
            self.content_spans[row] = self.content_spans[source]
        self.tables.fork(row, source)
        self._axes.fork(row, source)

    def _edit_tokens(self, edit: TokenEdit) -> None:
        row, first = edit.row, edit.first_position
        last = first + len(edit.token_ids)
        computed, length = int(self.num_computed[row]), int(self.num_tokens[row])
        assert self.is_live[row], f"{edit} is for a row that is not live"
        # If a computed token were replaced, its K and V would remain those of the old token. The
        # sampler's penalty counts would do so even after K and V were truncated.
        fixed = max(computed, int(self._num_computed_before_cuts[row]))
        assert fixed <= first <= length, f"{edit} does not begin in [{fixed}, {length}]"
        assert last > computed, f"{edit} leaves no token to compute after {computed}"
        self.token_ids[row, first:last] = edit.token_ids
        self.num_tokens[row] = last

    def _edit_table(self, edit: TableEdit) -> None:
        is_state = edit.group >= self.tables.num_token_groups
        assert not is_state or edit.kind is EditKind.REPLACE, f"{edit} is for the blocks of a state"
        self.tables.edit(edit)
        limit, computed = edit.first_logical_block * self._block_size, self.num_computed[edit.row]
        if edit.kind is EditKind.TRUNCATE and limit < computed:
            self.num_computed[edit.row] = limit
            most = self._num_computed_before_cuts
            most[edit.row] = max(most[edit.row], computed)

    def reset(self) -> None:
        """Drop all rows."""
        self._decodes = None
        self.is_live[:] = self.wants_prompt_logprobs[:] = False
        self.content_spans.clear()

    # ---- the step's tensors -----------------------------------------------------------------

    def build(self, plan: StepPlan) -> StepBatch:
        """The tensors of the step. Adds its tokens to the rows' num_computed."""
        # First, try the fast path for steps that only decode.
        paused = tuple(chunk.row for chunk in plan.chunks if not chunk.num_new_tokens)
        is_plain = len(paused) == len(plan.chunks) and not plan.forks
        if is_plain and not self.wants_prompt_logprobs.any():
            decodes = self._build_decodes(plan, paused)
            if decodes is not None:
                return decodes
        # Choose the rows and write their ids, positions and slots into the buffers.
        joins = [fork for fork in plan.forks if fork.joins_step]
        rows, counts, num_decodes = self._step_rows(plan, joins)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        assert num_tokens == plan.num_tokens, f"{num_tokens} tokens, the plan has {plan.num_tokens}"
        drafts = find_drafts(plan, rows, query_start)
        if drafts is not None:
            places = drafts.places(self.num_tokens, self.token_ids.shape[1])
            self.token_ids.reshape(-1)[places] = drafts.token_ids
        if num_decodes:
            self._fill_decodes(rows[:num_decodes])
        for index in range(num_decodes, len(rows)):
            self._fill_chunk(int(rows[index]), int(query_start[index]), int(counts[index]))
        # Count the tokens, drafts aside, as computed. Rows that thereby close their gap sample.
        context_lens = computed = self.num_computed[rows] + counts
        last = query_start[1:].astype(np.int64) - 1
        if drafts is not None:
            computed, last = computed - drafts.counts, last - drafts.counts
        assert (computed <= self.num_tokens[rows]).all(), "a row computes beyond its tokens"
        spans = self._prompt_logprob_spans(rows, query_start, counts)
        first_positions = self.num_computed[rows]
        pieces, whole = _content_pieces(
            self.content_spans, rows, first_positions, counts, query_start[:-1]
        )
        if self.content_token_id is not None:
            for _, _, num, place in pieces:
                self._input_ids[place : place + num] = self.content_token_id
        self.num_computed[rows] = computed
        closes = computed == self.num_tokens[rows]
        assert drafts is None or closes[drafts.counts > 0].all(), "drafts follow an open gap"
        sample_rows, sample_index = rows[closes], last[closes]
        joined_lines = NO_LINES
        # A joining row samples from the hidden state of its source.
        if joins:
            joined_lines = self._join(joins, sample_rows)
            sample_rows = np.append(sample_rows, [fork.row for fork in joins])
            sample_index = np.append(sample_index, sample_index[joined_lines.numpy()])
        attention = self._attention_batch(
            rows, query_start, counts, context_lens.astype(np.int32), num_decodes
        )
        _show_whole(attention, whole, first_positions, counts)
        states = state_batch(attention, self._state_tables)
        if drafts is not None:
            states.num_drafts_list = drafts.counts.tolist()
            states.num_drafts = torch.from_numpy(drafts.counts.astype(np.int32))
        return StepBatch(
            token_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            attention=attention,
            states=states,
            rows=rows,
            num_new_tokens=counts,
            sample_rows=sample_rows,
            sample_index=torch.from_numpy(sample_index),
            joined_lines=joined_lines,
            prompt_logprob_spans=spans,
            content_pieces=pieces,
            drafts=drafts,
        )

    def _build_decodes(self, plan: StepPlan, paused: tuple[int, ...]) -> StepBatch | None:
        """`build` for the most frequent steps, in which every live row closes a gap of one token or
        is paused. Reuses arrays and tensors of the last such step. Returns None if a gap is
        larger."""
        decodes = self._decodes
        if decodes is None or decodes.paused != paused:
            decodes = self._decodes = self._make_decodes(paused)
        rows, count = decodes.rows, len(decodes.rows)
        positions = self.num_computed[rows]
        computed = positions + 1
        if not (computed == self.num_tokens[rows]).all():
            return None
        assert count == plan.num_tokens, f"{count} tokens, the plan has {plan.num_tokens}"
        self._positions[:count] = self._axes.of_decodes(rows, positions)
        self._input_ids[:count] = self.token_ids.reshape(-1)[decodes.token_base + positions]
        self.tables.fill_slots(self._slots, slice(count), decodes.table_base, positions)
        decodes.context_lens[:] = computed
        self.num_computed[rows] = computed
        lens_list = computed.tolist()
        decodes.step.attention.context_lens_list = lens_list
        decodes.step.states.context_lens_list = lens_list
        return decodes.step

    def _make_decodes(self, paused: tuple[int, ...]) -> _Decodes:
        rows = _rows_without(self.is_live, paused)
        count = len(rows)
        counts, context_lens = np.ones(count, np.int64), np.zeros(count, np.int32)
        query_start = np.arange(count + 1, dtype=np.int32)
        attention = self._attention_batch(rows, query_start, counts, context_lens, count)
        step = StepBatch(
            token_ids=torch.from_numpy(self._input_ids[:count]),
            positions=torch.from_numpy(self._positions[:count]),
            attention=attention,
            states=state_batch(attention, self._state_tables),
            rows=rows,
            num_new_tokens=counts,
            sample_rows=rows,
            sample_index=torch.arange(count),
            joined_lines=NO_LINES,
            prompt_logprob_spans=[],
        )
        return _Decodes(
            paused=paused,
            rows=rows,
            token_base=rows * self.token_ids.shape[1],
            table_base=self.tables.base(rows),
            context_lens=context_lens,
            step=step,
        )

    def store_sampled(self, rows: Int64, sample: PendingSample) -> None:
        """Store the sampled tokens of `rows` at once.

        A row that failed gets token 0, since a step planned before the failure still computes it.
        """
        self.append_sampled(rows, np.maximum(sample.fetch().token_ids, 0))

    def append_sampled(self, rows: Int64, token_ids: Int64) -> None:
        """Store the sampled tokens as the next inputs of their rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.count_sampled(rows)

    def count_sampled(self, rows: Int64) -> None:
        """Add one to the number of tokens of `rows`. The token ids are stored elsewhere."""
        self.num_tokens[rows] += 1

    def prompt_token_ids(self, row: int, first: int, count: int) -> Int32:
        """`count` tokens of a row's prompt from index `first` on."""
        assert first + count <= self.num_prompt_tokens[row]
        return self.token_ids[row, first : first + count]

    def _join(self, joins: Sequence[RowFork], sample_rows: Int64) -> torch.Tensor:
        """Count the step's tokens as computed for the new forks that sample with their sources.
        Returns the indices of the source rows in `sample_rows`."""
        line_of = {row: line for line, row in enumerate(sample_rows.tolist())}
        rows = [fork.row for fork in joins]
        sources = [fork.source_row for fork in joins]
        for row, source in zip(rows, sources, strict=True):
            assert source in line_of, f"row {row} joins row {source}, which leaves its gap open"
        computed = self.num_computed[sources]
        assert (self.num_tokens[rows] == computed).all(), (
            "a joining row's tokens are not its source's"
        )
        for row, source, reached in zip(rows, sources, computed.tolist(), strict=True):
            assert self.tables.holds_tokens(row, reached), (
                f"row {row} joins row {source}, but a table ends before the step does"
            )
            # If the joining row had state blocks of its own, they would hold the state before the
            # step.
            assert self.tables.have_same_states(row, source), (
                f"row {row} joins row {source} without its states"
            )
        self.num_computed[rows] = computed
        return torch.tensor([line_of[source] for source in sources], dtype=torch.int64)

    def _step_rows(self, plan: StepPlan, joins: Sequence[RowFork]) -> tuple[Int64, Int64, int]:
        """The rows that compute, the number of tokens of each, and the number of decoding rows,
        which come first."""
        named = [chunk.row for chunk in plan.chunks]
        for fork in joins:
            assert fork.row not in named, f"row {fork.row} joins a step and computes a chunk"
            named.append(fork.row)
        decodes = _rows_without(self.is_live, named)
        chunks = [chunk for chunk in plan.chunks if chunk.num_new_tokens]
        rows = np.concatenate([decodes, np.array([chunk.row for chunk in chunks], np.int64)])
        counts = np.ones(len(rows), np.int64)
        counts[len(decodes) :] = [chunk.num_new_tokens for chunk in chunks]
        return rows, counts, len(decodes)

    def _fill_decodes(self, rows: Int64) -> None:
        count = len(rows)
        positions = self.num_computed[rows]
        self._positions[:count] = self._axes.of_decodes(rows, positions)
        self._input_ids[:count] = self.token_ids[rows, positions]
        self.tables.fill_slots(self._slots, slice(count), self.tables.base(rows), positions)

    def _fill_chunk(self, row: int, start: int, count: int) -> None:
        first = int(self.num_computed[row])
        positions = np.arange(first, first + count)
        span = slice(start, start + count)
        self._positions[span] = self._axes.of_chunk(row, first, count, start)
        self._input_ids[span] = self.token_ids[row, first : first + count]
        base = self.tables.base(np.array([row]))
        self.tables.fill_slots(self._slots, span, base, positions)

    def _attention_batch(
        self,
        rows: Int64,
        query_start: Int32,
        counts: Int64,
        context_lens: Int32,
        num_decodes: int,
    ) -> AttentionBatch:
        """Passes the block tables as views, so that no copy here grows with the context."""
        num_tokens = int(query_start[-1])
        groups = tuple(
            GroupBatch(
                block_tables=table,
                slot_mapping=torch.from_numpy(slots[:num_tokens]),
            )
            for table, slots in zip(self._token_tables, self._slots, strict=True)
        )
        return AttentionBatch(
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens),
            rows=torch.from_numpy(rows),
            query_lens_list=counts.tolist(),
            context_lens_list=context_lens.tolist(),
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


def _content_pieces(
    spans: Mapping[int, tuple[ContentSpan, ...]],
    rows: Int64,
    first_positions: Int64,
    counts: Int64,
    query_start: Int32,
) -> tuple[Sequence[ContentPiece], Sequence[ContentPiece]]:
    """(the parts of contents that the step's rows compute, the parts among them that must be
    computed in one step). `spans` has an entry for each row with spans; the other arguments have an
    element for each of `rows`."""
    pieces: list[ContentPiece] = []
    whole: list[ContentPiece] = []
    if not spans:
        return pieces, whole
    each_row = zip(
        *(each.tolist() for each in (rows, first_positions, counts, query_start)), strict=True
    )
    for row, first, count, start in each_row:
        for span in spans_between(spans.get(row, ()), first, first + count):
            begin = max(first, span.first_position)
            num_tokens = min(first + count, span.end) - begin
            offset = begin - span.first_position
            pieces.append(ContentPiece(span.digest, offset, num_tokens, start + begin - first))
            if span.in_one_step:
                assert num_tokens == span.num_tokens, f"row {row} computes a part of {span}"
                whole.append(pieces[-1])
    return pieces, whole


def _show_whole(
    attention: AttentionBatch, whole: Sequence[ContentPiece], first_positions: Int64, counts: Int64
) -> None:
    """Set the `visible_ends` of a step with these contents, which see all of themselves.

    Its rows compute `counts` tokens each, from first_positions on.
    """
    if not whole:
        return
    spans = zip(first_positions.tolist(), counts.tolist(), strict=True)
    ends = np.concatenate([np.arange(first, first + count) + 1 for first, count in spans])
    for _, _, num_tokens, place in whole:
        ends[place : place + num_tokens] = ends[place + num_tokens - 1]
    attention.visible_ends = torch.from_numpy(ends.astype(np.int32))
    attention.visible_ends_list = ends.tolist()


def state_batch(attention: AttentionBatch, tables: tuple[torch.Tensor, ...]) -> StateBatch:
    """The step of `attention` for recurrent layers. `tables` are the block tables of the state
    groups."""
    return StateBatch(
        query_start=attention.query_start,
        context_lens=attention.context_lens,
        rows=attention.rows,
        query_lens_list=attention.query_lens_list,
        context_lens_list=attention.context_lens_list,
        rows_list=attention.rows_list,
        num_decodes=attention.num_decodes,
        tables=tables,
    )


def _rows_without(is_live: npt.NDArray[np.bool_], named: Sequence[int]) -> Int64:
    """The live rows except `named`."""
    is_chosen = is_live.copy()
    is_chosen[list(named)] = False
    return np.flatnonzero(is_chosen)
