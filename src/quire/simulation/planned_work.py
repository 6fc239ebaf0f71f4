"""Counts the work of each step from its plan alone.

A plan contains only changes, so this module tracks the lengths of the rows. The same code counts
the work of measured steps (beside the real runner) and of predicted steps (in `virtual_engine`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad
from quire.core.step import HOLE_BLOCK, EditKind, StepPlan, TableEdit

#: After a step with _FEW prompt tokens or less, the processor's caches are almost unchanged. After
#: _MOST or more, their content is replaced. In between, the additional time of the next step grows
#: with the logarithm of the number of prompt tokens, as measured for 10 to 1,000 tokens.
_FEW, _MOST = 32, 1024
#: After each further step, this share of the coldness (see `PlannedWork`) remains, as measured.
_WARMING = 1 / 3
#: A smaller coldness counts as 0.
_WARM = 0.001

NO_BEAMS: Mapping[int, int] = {}


@dataclass(slots=True)
class _Row:
    """The lengths of a live row."""

    num_computed: int
    num_tokens: int
    #: The row's blocks in the first KV group.
    blocks: list[int]


class _CommonBlocks:
    """Counts the blocks that several rows share.

    Invariant: num_common is the number of entries in live tables minus the number of distinct
    blocks in them.
    """

    def __init__(self) -> None:
        self.num_common = 0
        self._counts: dict[int, int] = {}

    def enter(self, blocks: Iterable[int]) -> None:
        """Count the blocks that entered a table, except HOLE_BLOCK."""
        counts = self._counts
        for block in blocks:
            count = counts.get(block, 0)
            if block != HOLE_BLOCK:
                counts[block] = count + 1
                self.num_common += count > 0

    def leave(self, blocks: Iterable[int]) -> None:
        """Count the blocks that left a table, except HOLE_BLOCK."""
        counts = self._counts
        for block in blocks:
            if block == HOLE_BLOCK:
                continue
            count = counts[block] - 1
            if count:
                counts[block] = count
                self.num_common -= 1
            else:
                del counts[block]


class PlannedWork(NamedTuple):
    """The work of one step. "Tokens", "rows" and "blocks" below are counts."""

    #: The numbers of rows and tokens that the step computes.
    load: StepLoad
    #: The length after the step, in tokens, of the longest row that the step computes.
    longest: int
    #: Numbers of the rows that get a token.
    sampled: tuple[int, ...]
    #: Live rows.
    num_rows: int = 0
    #: Blocks that entered block tables.
    num_new_blocks: int = 0
    #: Sequences that entered rows, forks included.
    num_admissions: int = 0
    #: Tokens of the admitted sequences, except forks.
    num_admitted_tokens: int = 0
    #: Rows that became free.
    num_releases: int = 0
    #: Sequences that end with the step. The plan does not name them: after the result, the caller
    #: sets `num_ended` and `num_ended_tokens`.
    num_ended: int = 0
    #: Tokens of the sequences that end.
    num_ended_tokens: int = 0
    #: The share (0 to 1) of the processor's caches that prompts of earlier steps have overwritten.
    #: A cold step of a small model takes longer, because weights and KV must be read from memory.
    coldness: float = 0.0
    #: Tokens whose K and V the decoding rows read from memory; shared blocks count once.
    num_read: int = 0
    #: The sum of the lengths after the step, in tokens, of the rows that the step computes.
    num_context: int = 0
    #: New blocks in the tables of rows that were live before the step.
    num_appended_blocks: int = 0
    #: For each live row of a beam search, the number of candidates that its result has.
    beams: Mapping[int, int] = NO_BEAMS


class PlannedWorkCounter:
    """Tracks the lengths of all live rows, and counts the work of each plan.

    Invariant: a row has the same tokens here as in the runner, including tokens in flight, except
    for the last `_num_ahead` tokens of all rows.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._beams: dict[int, int] = {}
        # The load, the longest row and the sampled rows of the last step, if it decoded all rows.
        self._decoding: tuple[StepLoad, int, tuple[int, ...]] | None = None
        self._num_ahead = 0
        self._coldness = 0.0
        self._common = _CommonBlocks()

    def reset(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._beams.clear()
        self._decoding, self._num_ahead = None, 0
        self._common = _CommonBlocks()
        self._coldness = 0.0

    def count(self, plan: StepPlan) -> PlannedWork:
        """Apply a plan and return its step's work. Every plan must be given once and in order."""
        # First, change the rows and tables. If the rows of the last step decode again, no other
        # count is needed.
        changes_rows = plan.release or plan.admit or plan.forks or plan.token_edits or plan.chunks
        decoding = self._decoding
        if changes_rows or decoding is None or _cuts(plan):
            self._catch_up()
            decoding = None
        num_new_blocks = num_appended_blocks = 0
        joining: Mapping[int, int] = {}
        if decoding is None or plan.table_edits:
            num_new_blocks, num_appended_blocks, joining = self._change_rows(plan)
        if decoding is None:
            load, longest, sampled, num_context = self._compute(plan, joining)
            if sampled and load.num_decodes == len(self._rows) == len(sampled):
                self._decoding = load, longest, sampled
        else:
            (num_decodes, num_pairs, *_), longest, sampled = decoding
            load, longest = StepLoad(num_decodes, num_pairs + num_decodes), longest + 1
            num_context = load.num_decode_pairs
            self._decoding, self._num_ahead = (load, longest, sampled), self._num_ahead + 1
        num_pairs = load.num_decode_pairs
        num_read = num_pairs - self._block_size * self._common.num_common
        # `num_common` also counts rows with prompts, so it may be too large for the decoding rows.
        # They read at least as many tokens as their mean context.
        num_read = max(num_read, -(-num_pairs // max(1, load.num_decodes)))
        assert load.num_decodes + load.num_chunk_tokens == plan.num_tokens, (load, plan)
        # Finally, update the coldness for the next step.
        coldness = self._coldness
        self._coldness = coldness * _WARMING if coldness > _WARM else 0.0
        if load.num_chunk_tokens:
            self._coldness = max(_coldness_after(load.num_chunk_tokens), self._coldness)
        return PlannedWork(
            load,
            longest,
            sampled,
            len(self._rows),
            num_new_blocks,
            len(plan.admit) + len(plan.forks),
            sum(len(admission.token_ids) for admission in plan.admit),
            len(plan.release),
            coldness=coldness,
            num_read=num_read,
            num_context=num_context,
            num_appended_blocks=num_appended_blocks,
            beams=dict(self._beams) if self._beams else NO_BEAMS,
        )

    def _compute(
        self, plan: StepPlan, joining: Mapping[int, int]
    ) -> tuple[StepLoad, int, tuple[int, ...], int]:
        """Count a step's tokens as computed. Returns its load, the length of its longest row, the
        rows that sample, and the sum of the lengths of the rows that compute."""
        # A row without an entry in `chunks` decodes.
        counts = {chunk.row: chunk.num_new_tokens for chunk in plan.chunks}
        num_decodes = num_pairs = num_context = longest = 0
        load = StepLoad()
        sampled: list[int] = []
        for number, row in self._rows.items():
            if number in joining:
                continue
            count = counts.get(number)
            if count is None:
                num_decodes += 1
                row.num_computed += 1
                num_pairs += row.num_computed
            elif count:
                load = load.with_chunk(row.num_computed, count)
                row.num_computed += count
                num_context += row.num_computed
            else:
                continue
            longest = max(longest, row.num_computed)
            if row.num_computed == row.num_tokens:
                sampled.append(number)
                row.num_tokens += 1
        # A fork that joins the step samples from its source row's logits, and computes nothing.
        for number, source in joining.items():
            row, other = self._rows[number], self._rows[source]
            row.num_computed, row.num_tokens = other.num_computed, other.num_tokens
            sampled.append(number)
        load = load._replace(num_decodes=num_decodes, num_decode_pairs=num_pairs)
        return load, longest, tuple(sampled), num_context + num_pairs

    def _catch_up(self) -> None:
        """Count the tokens of the steps that only decoded all rows."""
        for row in self._rows.values() if self._num_ahead else ():
            row.num_computed += self._num_ahead
            row.num_tokens += self._num_ahead
        self._num_ahead, self._decoding = 0, None

    def _change_rows(self, plan: StepPlan) -> tuple[int, int, dict[int, int]]:
        """Apply a plan's changes to the rows.

        Returns the number of blocks that entered tables, how many of them were appended to rows
        that were live before, and the source row of each row that joins the step.
        """
        # First, release, admit and fork rows.
        rows, common, num_new_blocks, num_appended_blocks = self._rows, self._common, 0, 0
        for number in plan.release:
            common.leave(rows.pop(number).blocks)
            self._beams.pop(number, None)
        for admission in plan.admit:
            blocks = list(admission.block_tables[0])
            rows[admission.row] = _Row(
                admission.num_computed_tokens, len(admission.token_ids), blocks
            )
            common.enter(blocks)
            num_new_blocks += sum(map(len, admission.block_tables))
            if admission.params.beam_width:
                self._beams[admission.row] = admission.params.num_beam_candidates
        joining: dict[int, int] = {}
        for fork in plan.forks:
            source = rows[fork.source_row]
            rows[fork.row] = _Row(source.num_computed, source.num_tokens, [*source.blocks])
            common.enter(source.blocks)
            if fork.joins_step:
                joining[fork.row] = fork.source_row
            if fork.params.beam_width:
                self._beams[fork.row] = fork.params.num_beam_candidates
        # Then edit their tokens and tables.
        for token_edit in plan.token_edits:
            edited = rows[token_edit.row]
            edited.num_tokens = token_edit.first_position + len(token_edit.token_ids)
        for edit in plan.table_edits:
            if edit.kind is EditKind.APPEND:
                num_appended_blocks += len(edit.block_ids)
            elif edit.kind is EditKind.TRUNCATE:
                row = rows[edit.row]
                row.num_computed = min(
                    row.num_computed, edit.first_logical_block * self._block_size
                )
            if edit.group == 0:
                self._edit(edit)
        return num_new_blocks + num_appended_blocks, num_appended_blocks, joining

    def _edit(self, edit: TableEdit) -> None:
        """Apply a change to a row's blocks in the first KV group."""
        row, first = self._rows[edit.row], edit.first_logical_block
        is_cut = edit.kind is EditKind.TRUNCATE
        end = len(row.blocks) if is_cut else first + len(edit.block_ids)
        self._common.leave(row.blocks[first:end])
        row.blocks[first:end] = edit.block_ids
        self._common.enter(edit.block_ids)


def _cuts(plan: StepPlan) -> bool:
    """Whether a plan makes a table shorter."""
    return any(edit.kind is EditKind.TRUNCATE for edit in plan.table_edits)


def _coldness_after(num_tokens: int) -> float:
    """The coldness (see `PlannedWork`) that a step with num_tokens prompt tokens leaves."""
    return math.log1p(min(num_tokens, _MOST) / _FEW) / math.log1p(_MOST / _FEW)
