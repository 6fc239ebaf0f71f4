"""Collects the changes of rows and tables for the next step plan.

The scheduler and its parts record here all that they change in rows and tables; the next plan
carries all of it, so the runner's tables equal the scheduler's.
"""

from quire.core.sequence import Sequence
from quire.core.step import (
    AdapterLoad,
    BlockCopy,
    Chunk,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)


class PlanBuilder:
    """Changes of rows that the runner does not know of yet.

    Invariant: no entry but `released` concerns a row whose last owner, as the runner knows it, has
    left it since the entry was made.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: the runner has, too."""
        self.released: dict[int, None] = {}  # a set that keeps its order
        self.admissions: list[RowAdmission] = []
        self.forks: list[RowFork] = []
        self.token_edits: list[TokenEdit] = []
        self.table_edits: list[TableEdit] = []
        self.copies: list[BlockCopy] = []
        self.adapter_loads: list[AdapterLoad] = []

    def admit(self, sequence: Sequence) -> None:
        """The whole state of a sequence that has just got its row."""
        assert sequence.row is not None
        self.admissions.append(
            RowAdmission(
                sequence.row,
                sequence.token_ids,
                sequence.num_prompt_tokens,
                sequence.num_computed_tokens,
                tuple(tuple(table) for table in sequence.block_tables),
                sequence.params,
                sequence.branch_index,
                sequence.adapter_slot,
            )
        )

    def fork(self, child: Sequence, parent: Sequence, *, joins_step: bool) -> None:
        """The row of `child` becomes a copy of that of `parent`, with its tables as they are now.

        Forks are carried out before the edits of a plan, so the child gets the parent's edits too.
        """
        assert child.row is not None and parent.row is not None
        self.forks.append(
            RowFork(child.row, parent.row, child.params, child.branch_index, joins_step)
        )
        self.table_edits += [
            edit._replace(row=child.row) for edit in self.table_edits if edit.row == parent.row
        ]

    def edit_tables(self, edits: list[TableEdit]) -> None:
        """What changed in the tables of rows."""
        self.table_edits += edits

    def edit_token(self, row: int, position: int, token_id: int) -> None:
        """Replace the last token of a row, at `position`: the runner sampled another."""
        self.token_edits.append(TokenEdit(row, position, (token_id,)))

    def copy(self, copies: list[BlockCopy]) -> None:
        """Blocks to copy before the coming step computes.

        A copy whose source is the target of an earlier copy reads that copy's source instead; a
        target that was freed and taken again keeps only its last copy.
        """
        originals = {copy.target: copy.source for copy in self.copies}
        targets = {copy.target for copy in copies}
        self.copies = [copy for copy in self.copies if copy.target not in targets]
        self.copies += [
            BlockCopy(originals.get(source, source), target) for source, target in copies
        ]

    def release(self, row: int) -> None:
        """The owner of a row leaves it; drops the row's unsent edits.

        A row whose fork was never sent is free in the runner already.
        """
        is_known = all(fork.row != row for fork in self.forks)
        if is_known:
            self.released[row] = None
        self.forks = [fork for fork in self.forks if fork.row != row]
        self.token_edits = [edit for edit in self.token_edits if edit.row != row]
        self.table_edits = [edit for edit in self.table_edits if edit.row != row]

    def take(
        self, step_id: int, num_rows: int, num_tokens: int, chunks: tuple[Chunk, ...]
    ) -> StepPlan:
        """The plan, with all that was collected; nothing is left."""
        plan = StepPlan(
            step_id=step_id,
            num_rows=num_rows,
            num_tokens=num_tokens,
            release=tuple(self.released),
            admit=tuple(self.admissions),
            forks=tuple(self.forks),
            token_edits=tuple(self.token_edits),
            table_edits=tuple(self.table_edits),
            chunks=chunks,
            copies=tuple(self.copies),
            adapter_loads=tuple(self.adapter_loads),
        )
        self.clear()
        return plan
