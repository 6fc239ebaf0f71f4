"""What each step computes, read from its plan alone.

A plan says what changed, so the rows' lengths are kept here. Used beside the real runner, to say
what a step was that was measured, and by the clock of `virtual_run` in its place: what is measured
and what is predicted are counted by the same code.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad
from quire.core.step import HOLE_BLOCK, EditKind, StepPlan, TableEdit

_FEW, _MOST = 32, 1024
"""Tokens of prompts of which a step takes little from the caches, and all that it can: between them
the next step takes longer with the logarithm of their number, as measured after 10 to 1,000."""
_WARMING = 1 / 3
"""Of what one step finds missing in the caches, what the next one still does, as measured."""
_WARM = 0.001
"""Less is nothing."""


@dataclass(slots=True)
class _Row:
    """blocks: of its first KV group."""

    num_computed: int
    num_tokens: int
    blocks: list[int]


class _CommonBlocks:
    """Counts what rows have in common. Invariant: num_common is the number of entries that live
    tables have beyond one for each block."""

    def __init__(self) -> None:
        self.num_common = 0
        self._counts: dict[int, int] = {}

    def enter(self, blocks: Iterable[int]) -> None:
        """They are in one more table. HOLE_BLOCK is nothing."""
        counts = self._counts
        for block in blocks:
            count = counts.get(block, 0)
            if block != HOLE_BLOCK:
                counts[block] = count + 1
                self.num_common += count > 0

    def leave(self, blocks: Iterable[int]) -> None:
        """They are in one table less."""
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


class RowWork(NamedTuple):
    """What one step is.

    load: what it computes. longest: tokens of the longest row after it. sampled: rows that get a
    token. num_rows: live ones. num_new_blocks: that entered block tables; num_appended_blocks:
    those of them that entered tables of rows that were there already. num_admissions: sequences
    that entered rows, with num_admitted_tokens. num_releases: rows that were left. num_ended:
    sequences that end with it, with num_ended_tokens; a plan doesn't say, so these are added when
    its result has come. coldness: what the prompts of earlier steps have taken of what the caches
    hold of weights and KV, from 0 to 1: a small model feels it until that is back. num_read: tokens
    of the decoding rows, those of blocks that several have counted once: so much K and V comes from
    memory.
    """

    load: StepLoad
    longest: int
    sampled: tuple[int, ...]
    num_rows: int = 0
    num_new_blocks: int = 0
    num_admissions: int = 0
    num_admitted_tokens: int = 0
    num_releases: int = 0
    num_ended: int = 0
    num_ended_tokens: int = 0
    coldness: float = 0.0
    num_read: int = 0
    num_appended_blocks: int = 0


class RowLoads:
    """The lengths of all live rows, by the plans so far.

    Invariant: a row here has the tokens that the runner's has, those in flight included.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._coldness = 0.0
        self._common = _CommonBlocks()

    def reset(self) -> None:
        """All rows were dropped."""
        self._rows.clear()
        self._common = _CommonBlocks()
        self._coldness = 0.0

    def take(self, plan: StepPlan) -> RowWork:
        """Follow a plan; returns what its step computes. Each plan once, in order."""
        num_new_blocks, num_appended_blocks, joining = self._change_rows(plan)
        counts = dict(plan.chunks)
        num_decodes = num_pairs = longest = 0
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
            else:
                continue
            longest = max(longest, row.num_computed)
            if row.num_computed == row.num_tokens:
                sampled.append(number)
                row.num_tokens += 1
        for number, source in joining.items():
            row, other = self._rows[number], self._rows[source]
            row.num_computed, row.num_tokens = other.num_computed, other.num_tokens
            sampled.append(number)
        num_read = num_pairs - self._block_size * self._common.num_common
        num_read = max(num_read, -(-num_pairs // max(1, num_decodes)))  # prompts share some, too
        load = load._replace(num_decodes=num_decodes, num_decode_pairs=num_pairs)
        assert num_decodes + load.num_chunk_tokens == plan.num_tokens, (load, plan)
        num_tokens = sum(len(admission.token_ids) for admission in plan.admit)
        num_admissions = len(plan.admit) + len(plan.forks)
        coldness = self._coldness
        warmer = coldness * _WARMING if coldness > _WARM else 0.0
        self._coldness = max(_coldness_after(load.num_chunk_tokens), warmer)
        return RowWork(
            load,
            longest,
            tuple(sampled),
            len(self._rows),
            num_new_blocks,
            num_admissions,
            num_tokens,
            len(plan.release),
            coldness=coldness,
            num_read=num_read,
            num_appended_blocks=num_appended_blocks,
        )

    def _change_rows(self, plan: StepPlan) -> tuple[int, int, dict[int, int]]:
        """Blocks that entered tables, those of them that were appended, and by row that joins the
        step its source."""
        rows, common, num_new_blocks, num_appended_blocks = self._rows, self._common, 0, 0
        for number in plan.release:
            common.leave(rows.pop(number).blocks)
        for admission in plan.admit:
            blocks = list(admission.block_tables[0])
            rows[admission.row] = _Row(
                admission.num_computed_tokens, len(admission.token_ids), blocks
            )
            common.enter(blocks)
            num_new_blocks += sum(map(len, admission.block_tables))
        joining: dict[int, int] = {}
        for fork in plan.forks:
            source = rows[fork.source_row]
            rows[fork.row] = _Row(source.num_computed, source.num_tokens, [*source.blocks])
            common.enter(source.blocks)
            if fork.joins_step:
                joining[fork.row] = fork.source_row
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
        """Follow a change of a row's blocks."""
        row, first = self._rows[edit.row], edit.first_logical_block
        is_cut = edit.kind is EditKind.TRUNCATE
        end = len(row.blocks) if is_cut else first + len(edit.block_ids)
        self._common.leave(row.blocks[first:end])
        row.blocks[first:end] = edit.block_ids
        self._common.enter(edit.block_ids)


def _coldness_after(num_tokens: int) -> float:
    """What so many tokens of prompts leave."""
    return math.log1p(min(num_tokens, _MOST) / _FEW) / math.log1p(_MOST / _FEW)
