"""Collects the changes of rows and tables for the next step plan.

The scheduler and its parts record every change of rows and tables here, and the next plan carries
them, so that the runner's tables equal the scheduler's.
"""

from quire.core.sequence import Sequence
from quire.core.step import (
    BlockCopy,
    Chunk,
    DraftOrder,
    ItemLoad,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)


class PlanBuilder:
    """Changes of rows that were not sent to the runner yet.

    Invariant: apart from `released`, no entry concerns a row that was released after the entry was
    made.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changes, because the runner has dropped all rows."""
        self.released: dict[int, None] = {}  # a set that keeps its order
        self.admissions: list[RowAdmission] = []
        self.forks: list[RowFork] = []
        self.token_edits: list[TokenEdit] = []
        self.table_edits: list[TableEdit] = []
        self.copies: list[BlockCopy] = []
        self.adapter_loads: list[ItemLoad] = []
        self.content_loads: list[ItemLoad] = []

    def admit(self, sequence: Sequence) -> None:
        """Record the whole state of a sequence that has just got its row."""
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
                sequence.content_spans,
            )
        )

    def fork(self, child: Sequence, parent: Sequence, *, joins_step: bool) -> None:
        """Make the row of `child` a copy of the row of `parent`, with its tables as they are now.

        The runner carries out forks before the edits of a plan, so the edits of the parent are
        repeated for the child.
        """
        assert child.row is not None and parent.row is not None
        self.forks.append(
            RowFork(child.row, parent.row, child.params, child.branch_index, joins_step)
        )
        self.table_edits += [
            edit._replace(row=child.row) for edit in self.table_edits if edit.row == parent.row
        ]

    def edit_tables(self, edits: list[TableEdit]) -> None:
        """Record changes of rows' tables."""
        self.table_edits += edits

    def edit_token(self, row: int, position: int, token_id: int) -> None:
        """Replace the last token of a row, at `position`, because the runner sampled a different
        token."""
        self.token_edits.append(TokenEdit(row, position, (token_id,)))

    def copy(self, copies: list[BlockCopy]) -> None:
        """Record blocks to copy before the coming step computes.

        If a source is the target of an earlier copy, the source of that copy is read instead. If a
        target was freed and taken again, only its last copy stays.
        """
        originals = {copy.target: copy.source for copy in self.copies}
        targets = {copy.target for copy in copies}
        self.copies = [copy for copy in self.copies if copy.target not in targets]
        self.copies += [
            BlockCopy(originals.get(source, source), target) for source, target in copies
        ]

    def release(self, row: int) -> None:
        """Record that a row is free, and drop the row's unsent edits.

        A row whose fork was never sent is free in the runner already.
        """
        is_known = all(fork.row != row for fork in self.forks)
        if is_known:
            self.released[row] = None
        self.forks = [fork for fork in self.forks if fork.row != row]
        self.token_edits = [edit for edit in self.token_edits if edit.row != row]
        self.table_edits = [edit for edit in self.table_edits if edit.row != row]

    def build(
        self,
        step_id: int,
        num_rows: int,
        num_tokens: int,
        chunks: tuple[Chunk, ...],
        draft_orders: tuple[DraftOrder, ...] = (),
    ) -> StepPlan:
        """Return the plan with all recorded changes, and forget them."""
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
            content_loads=tuple(self.content_loads),
            draft_orders=draft_orders,
        )
        self.clear()
        return plan
