"""What each step computes, read from its plan alone.

A plan says what changed, so the rows' lengths are kept here. Used beside the real runner, to say
what a step was that was measured, and by the clock of `virtual_run` in its place: what is measured
and what is predicted are counted by the same code.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad
from quire.core.step import EditKind, StepPlan

FILLED = 128
"""Tokens of prompts after which caches hold nothing of a small model."""


@dataclass(slots=True)
class _Row:
    num_computed: int
    num_tokens: int


class RowWork(NamedTuple):
    """What one step is.

    load: what it computes. longest: tokens of the longest row after it. sampled: rows that get a
    token. num_rows: live ones. num_new_blocks: that entered block tables. num_admissions: sequences
    that entered rows, with num_admitted_tokens. num_releases: rows that were left. num_ended:
    sequences that end with it, with num_ended_tokens; a plan doesn't say, so these are added when
    its result has come. num_before: tokens of prompts that earlier steps computed, at most FILLED,
    half as many with each step since: these took the place of what the caches hold of weights and
    KV, which a small model feels until they are back.
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
    num_before: int = 0


class RowLoads:
    """The lengths of all live rows, by the plans so far.

    Invariant: a row here has the tokens that the runner's has, those in flight included.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._num_before = 0

    def reset(self) -> None:
        """All rows were dropped."""
        self._rows.clear()
        self._num_before = 0

    def take(self, plan: StepPlan) -> RowWork:
        """Follow a plan; returns what its step computes. Each plan once, in order."""
        num_new_blocks, joining = self._change_rows(plan)
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
        load = load._replace(num_decodes=num_decodes, num_decode_pairs=num_pairs)
        assert num_decodes + load.num_chunk_tokens == plan.num_tokens, (load, plan)
        num_tokens = sum(len(admission.token_ids) for admission in plan.admit)
        num_admissions = len(plan.admit) + len(plan.forks)
        num_before = self._num_before
        self._num_before = max(min(load.num_chunk_tokens, FILLED), num_before // 2)
        return RowWork(
            load,
            longest,
            tuple(sampled),
            len(self._rows),
            num_new_blocks,
            num_admissions,
            num_tokens,
            len(plan.release),
            num_before=num_before,
        )

    def _change_rows(self, plan: StepPlan) -> tuple[int, dict[int, int]]:
        """Blocks that entered tables, and by row that joins the step its source."""
        rows, num_new_blocks = self._rows, 0
        for number in plan.release:
            del rows[number]
        for admission in plan.admit:
            rows[admission.row] = _Row(admission.num_computed_tokens, len(admission.token_ids))
            num_new_blocks += sum(map(len, admission.block_tables))
        joining: dict[int, int] = {}
        for fork in plan.forks:
            source = rows[fork.source_row]
            rows[fork.row] = _Row(source.num_computed, source.num_tokens)
            if fork.joins_step:
                joining[fork.row] = fork.source_row
        for edit in plan.table_edits:
            if edit.kind is EditKind.APPEND:
                num_new_blocks += len(edit.block_ids)
            elif edit.kind is EditKind.TRUNCATE:
                row = rows[edit.row]
                row.num_computed = min(
                    row.num_computed, edit.first_logical_block * self._block_size
                )
        return num_new_blocks, joining
