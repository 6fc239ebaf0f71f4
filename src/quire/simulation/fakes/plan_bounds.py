"""Bounds of a fake runner's plans: its sizes and the kinds of its KV groups.

These checks need no rows; `plan_rows` has the checks of plans against the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import HOLE_BLOCK, EditKind, RowAdmission, StepPlan, TableEdit
from quire.simulation.plan_rows import PlanHistory


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Refuses plans that no rows could carry out."""

    history: PlanHistory
    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    max_num_rows: int
    #: Maximum number of tokens of a row.
    max_num_tokens: int

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan that exceeds the sizes, or has an edit that a group's kind doesn't have."""
        for admission in plan.admit:
            self._check_admission(admission)
        for fork in plan.forks:
            if not 0 <= fork.row < self.max_num_rows:
                self.history.refuse(f"fork into row {fork.row}, which is not free", fork.row)
        for token_edit in plan.token_edits:
            if token_edit.first_position + len(token_edit.token_ids) > self.max_num_tokens:
                self.history.refuse(f"{token_edit} of {self.max_num_tokens} places", token_edit.row)
        for edit in plan.table_edits:
            self._check_edit(edit)

    def new_blocks(self, plan: StepPlan) -> list[tuple[int, int]]:
        """The new, empty blocks that a plan assigns, each with its row. A fork that joins the step
        gets the blocks of its source."""
        found = [
            (block, admission.row)
            for admission in plan.admit
            for group, table in enumerate(admission.block_tables)
            for block in table[self._num_filled(admission, group) :]
        ]
        joining = {fork.row for fork in plan.forks if fork.joins_step}
        for edit in plan.table_edits:
            if edit.kind is EditKind.APPEND and edit.row not in joining:
                found += [(block, edit.row) for block in edit.block_ids]
        return found

    def _num_filled(self, admission: RowAdmission, group: int) -> int:
        """The number of blocks that have data at the admission. New blocks follow them."""
        if self.groups[group].kind is KVKind.STATE:
            return self.groups[group].num_state_blocks if admission.num_computed_tokens else 0
        return -(-admission.num_computed_tokens // self.block_size)

    def _check_admission(self, admission: RowAdmission) -> None:
        row, refuse = admission.row, self.history.refuse
        num_tokens, computed = len(admission.token_ids), admission.num_computed_tokens
        if not 0 <= row < self.max_num_rows:
            refuse(f"admission into row {row} of {self.max_num_rows}", row)
        if not 0 <= computed < num_tokens <= self.max_num_tokens:
            refuse(f"admission with {computed} of {num_tokens} tokens computed", row)
        if not 0 < admission.num_prompt_tokens <= num_tokens:
            refuse(f"admission with {admission.num_prompt_tokens} prompt tokens", row)
        if len(admission.block_tables) != len(self.groups):
            refuse(f"admission with {len(admission.block_tables)} tables", row)
        for group, table in enumerate(admission.block_tables):
            if self.groups[group].kind is KVKind.STATE:
                num_blocks = self.groups[group].num_state_blocks
                if len(table) != num_blocks:
                    refuse(f"a state takes {num_blocks} blocks, but its table has {table}", row)
            elif len(table) * self.block_size < computed:
                refuse(
                    f"{computed} tokens are computed, but the table has {len(table)} blocks", row
                )
            self._check_new(row, table[self._num_filled(admission, group) :])
            self._check_blocks(row, group, 0, table)

    def _check_edit(self, edit: TableEdit) -> None:
        row, group, kind, first, ids = edit
        if self.groups[group].kind is KVKind.STATE and kind is not EditKind.REPLACE:
            self.history.refuse(f"{kind.value} of a state: {edit}", row)
        if kind is EditKind.APPEND:
            self._check_new(row, ids)
        if kind is EditKind.HOLE and any(block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"a hole names blocks: {ids}", row)
        if kind is EditKind.REPLACE and HOLE_BLOCK in ids:
            self.history.refuse(f"replaced by a hole: {edit}", row)
        self._check_blocks(row, group, first, ids)

    def _check_new(self, row: int, ids: Sequence[int]) -> None:
        if HOLE_BLOCK in ids:
            self.history.refuse(f"a hole is given to row {row} as a new block: {ids}", row)

    def _check_blocks(self, row: int, group: int, first: int, ids: Sequence[int]) -> None:
        """Check blocks that enter a table at index `first`."""
        kind, end = self.groups[group].kind, first + len(ids)
        if HOLE_BLOCK in ids and kind is not KVKind.WINDOW:
            self.history.refuse(f"a hole in group {group}, which is read whole: {ids}", row)
        if any(not 0 <= block < self.num_blocks and block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"block ids {ids}, but the pool has {self.num_blocks}", row)
        if ids and kind is not KVKind.STATE and (end - 1) * self.block_size >= self.max_num_tokens:
            self.history.refuse(f"a table of {end} blocks is beyond its bound", row)
