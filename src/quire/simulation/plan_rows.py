"""The rows of all live sequences, as the plans of steps change them.

`PlanRows` carries out plans on counts of tokens and on block tables; it has no token ids. With it,
`planned_work` counts the work of steps, and `fakes.fake_runner` checks what they read and write. A
plan that contradicts the rows is refused: an AssertionError lists the row's changes in the last
plans.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from quire.core.step import (
    HOLE_BLOCK,
    Chunk,
    EditKind,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)

NUM_REMEMBERED_PLANS = 32


class PlanHistory:
    """The last plans, which the error messages of refusals list."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque(maxlen=NUM_REMEMBERED_PLANS)

    def add(self, plan: StepPlan) -> None:
        """Remember a plan, and forget the oldest one if there are many."""
        self._plans.append(plan)

    def refuse(self, message: str, row: int | None = None) -> NoReturn:
        """Raise AssertionError with the message and the row's changes in the last plans."""
        descriptions = [f"  step {plan.step_id}: {_describe(plan, row)}" for plan in self._plans]
        whose = "all rows" if row is None else f"row {row}"
        raise AssertionError("\n".join([message, f"the last plans, for {whose}:", *descriptions]))


def _describe(plan: StepPlan, row: int | None) -> str:
    def concerns(other: int) -> bool:
        return row is None or other == row

    parts = [f"{plan.num_rows} rows, {plan.num_tokens} tokens"]
    parts += [f"release {other}" for other in plan.release if concerns(other)]
    parts += [
        f"admit {admission.row} with {admission.num_computed_tokens} of"
        f" {len(admission.token_ids)} tokens computed, tables {admission.block_tables}"
        for admission in plan.admit
        if concerns(admission.row)
    ]
    parts += [
        f"fork {fork.row} from {fork.source_row}{', joins' if fork.joins_step else ''}"
        for fork in plan.forks
        if concerns(fork.row) or concerns(fork.source_row)
    ]
    parts += [str(edit) for edit in plan.token_edits if concerns(edit.row)]
    parts += [str(edit) for edit in plan.table_edits if concerns(edit.row)]
    if plan.copies:
        parts.append(f"copy {', '.join(f'{copy.source} to {copy.target}' for copy in plan.copies)}")
    parts += [str(chunk) for chunk in plan.chunks if concerns(chunk.row)]
    return "; ".join(parts)


@dataclass(slots=True, eq=False)
class PlanRow:
    """A live row. The next sequence with the same row number has another `PlanRow`."""

    #: The row's number in plans.
    number: int
    #: The row's admission; for a fork, that of its source row with the fork's parameters.
    admission: RowAdmission
    #: The number of the row's tokens, including tokens that steps in flight will append.
    num_tokens: int
    num_computed: int
    #: The block table of each KV group.
    tables: list[list[int]]
    #: The largest `num_computed` that a TRUNCATE has lowered; 0 if there was none.
    num_cut: int = 0
    #: The number of drafts that a step in flight verifies. `num_tokens` and `num_computed` count as
    #: if all were rejected, until `PlanRows.end_drafts`.
    num_drafts: int = 0


class RowChunk(NamedTuple):
    """The positions that a step computes of one row."""

    row: PlanRow
    #: Number of computed tokens before the step.
    start: int
    #: Number of computed tokens after the step, drafts included.
    end: int
    #: The last of the computed tokens, if the step verifies them.
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class ComputedRows:
    """The rows that compute or sample in a step, in the order of their admission."""

    #: The rows that no chunk names; each computes one token.
    decodes: list[PlanRow] = field(default_factory=list)
    #: The chunks that compute tokens, by row number.
    chunks: dict[int, RowChunk] = field(default_factory=dict)
    #: The rows that get a token. Forks that join the step are last.
    sampling: list[PlanRow] = field(default_factory=list)


class PlanRows:
    """All live rows.

    Invariant: num_holders[group][block] is the number of times that a block occurs in the tables of
    a KV group. num_common[group] is the number of entries in these tables minus the number of
    distinct blocks in them. HOLE_BLOCK is not counted.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.history = PlanHistory()
        #: The live rows by number, in the order of their admission.
        self.live: dict[int, PlanRow] = {}
        #: For each group, counts by block; blocks that have left all tables may be listed with 0.
        self.num_holders: dict[int, dict[int, int]] = defaultdict(dict)
        self.num_common: dict[int, int] = defaultdict(int)

    def reset(self) -> None:
        """Drop all rows."""
        self.live.clear()
        self.num_holders.clear()
        self.num_common.clear()

    def change(self, plan: StepPlan) -> None:
        """Carry out release, admit, forks, token_edits and table_edits."""
        live = self.live
        for number in plan.release:
            self._count_tables(self._row(number, "release"), -1)
            del live[number]
        for admission in plan.admit:
            self._admit(admission)
        for fork in plan.forks:
            self._fork(fork)
        for token_edit in plan.token_edits:
            self._edit_tokens(token_edit)
        for table_edit in plan.table_edits:
            self.edit_table(table_edit)
        if len(live) != plan.num_rows:
            self.history.refuse(f"{len(live)} rows live, the plan says {plan.num_rows}")

    def compute(self, plan: StepPlan) -> ComputedRows:
        """Count the step's tokens as computed, and one more token for each row that samples.

        The plan's changes have been made. Drafts are counted when `end_drafts` is called.
        """
        # First, find the rows that decode: those that no chunk names and that don't join.
        live, refuse, step = self.live, self.history.refuse, ComputedRows()
        joining = {fork.row: fork.source_row for fork in plan.forks if fork.joins_step}
        named: dict[int, Chunk] = {}
        for chunk in plan.chunks:
            if chunk.row not in live or chunk.row in joining or chunk.row in named:
                refuse(f"{chunk} names a row that is not live, or twice", chunk.row)
            named[chunk.row] = chunk
        # Then, count tokens. A row without uncomputed tokens samples.
        num_tokens = 0
        for number, row in live.items():
            if number in named:
                count = named[number].num_new_tokens
                if not count:
                    continue
                step.chunks[number] = self._compute_chunk(row, named[number])
                num_tokens += count
                if row.num_computed < row.num_tokens:
                    continue
            elif number in joining:
                continue
            else:
                if row.num_tokens - row.num_computed != 1 or row.num_drafts:
                    self._refuse_work(row)
                row.num_computed += 1
                step.decodes.append(row)
            row.num_tokens += 1
            step.sampling.append(row)
        num_tokens += len(step.decodes)
        if num_tokens != plan.num_tokens:
            refuse(f"{num_tokens} tokens to compute, the plan says {plan.num_tokens}")
        if not num_tokens:
            refuse("a step that computes nothing")
        # Finally, let forks join: they sample from their source rows' logits.
        for number, source_number in joining.items():
            self._join(live[number], live[source_number], step)
        return step

    def end_drafts(self, row: PlanRow, num_accepted: int, *, are_computed: bool = True) -> None:
        """Count the accepted drafts of a row, once they are known, as its tokens.

        are_computed: whether they count as computed, too. In models with states they don't.
        """
        row.num_drafts = 0
        row.num_tokens += num_accepted
        if are_computed:
            row.num_computed += num_accepted

    def holders(self, block: int) -> str:
        """Text for error messages: the (row, group) pairs whose tables contain a block."""
        found = [
            (row.number, group)
            for row in self.live.values()
            for group, table in enumerate(row.tables)
            if block in table
        ]
        return f"the tables of (row, group) {sorted(found)}"

    # ---- the plan's changes -----------------------------------------------------------------

    def _admit(self, admission: RowAdmission) -> None:
        number = admission.row
        if number in self.live:
            self.history.refuse(f"admission into row {number}, which is live", number)
        tables = [list(table) for table in admission.block_tables]
        # The caller may append to its list of tokens.
        admission = admission._replace(token_ids=tuple(admission.token_ids))
        num_computed = admission.num_computed_tokens
        row = PlanRow(number, admission, len(admission.token_ids), num_computed, tables)
        self.live[number] = row
        self._count_tables(row, 1)

    def _fork(self, fork: RowFork) -> None:
        number = fork.row
        if number in self.live:
            self.history.refuse(f"fork into row {number}, which is not free", number)
        source = self._row(fork.source_row, f"fork into row {number}")
        admission = source.admission._replace(
            row=number, params=fork.params, branch_index=fork.branch_index
        )
        tables = [list(table) for table in source.tables]
        row = replace(source, number=number, admission=admission, tables=tables)
        self.live[number] = row
        self._count_tables(row, 1)

    def _edit_tokens(self, edit: TokenEdit) -> None:
        row, first = self._row(edit.row, "token edit"), edit.first_position
        if not 0 < first <= row.num_tokens:
            self.history.refuse(f"{edit} of a row with {row.num_tokens} tokens", edit.row)
        num_tokens = first + len(edit.token_ids)
        if first < max(row.num_cut, row.num_computed) or num_tokens <= row.num_computed:
            self.history.refuse(
                f"{edit} replaces computed ones: {row.num_computed} are, and"
                f" {row.num_cut} were before a table was truncated",
                edit.row,
            )
        row.num_tokens = num_tokens

    def edit_table(self, edit: TableEdit) -> None:
        """Change a table; a TRUNCATE also lowers the row's number of computed tokens."""
        number, group, kind, first, ids = edit
        row, refuse = self._row(number, "table edit"), self.history.refuse
        table = row.tables[group]
        end = len(table) if kind is EditKind.TRUNCATE else first + len(ids)
        if kind is EditKind.APPEND:
            if first != len(table):
                refuse(f"APPEND at {first} to a table of {len(table)} blocks", number)
        elif not first <= end <= len(table):
            refuse(f"{kind.value} beyond a table of {len(table)} blocks", number)
        elif kind is EditKind.TRUNCATE:
            if row.num_drafts:
                refuse(f"{edit} of a row whose drafts are in flight", number)
            row.num_cut = max(row.num_cut, row.num_computed)
            row.num_computed = min(row.num_computed, first * self.block_size)
        self._count(group, table[first:end], -1)
        table[first:end] = ids
        self._count(group, ids, 1)

    def _count_tables(self, row: PlanRow, by: int) -> None:
        """Count the blocks of a row's tables as entered (by = 1) or left (by = -1)."""
        for group, table in enumerate(row.tables):
            self._count(group, table, by)

    def _count(self, group: int, blocks: Iterable[int], by: int) -> None:
        """Count the blocks that entered (by = 1) or left (by = -1) a table of a group."""
        holders, num_common, from_count = self.num_holders[group], 0, 1 if by > 0 else 2
        for block in blocks:
            if block != HOLE_BLOCK:
                count = holders.get(block, 0)
                holders[block] = count + by
                num_common += count >= from_count
        self.num_common[group] += by * num_common

    def _row(self, number: int, what: str) -> PlanRow:
        """A live row. `what` describes the change for which the row is needed."""
        row = self.live.get(number)
        if row is None:
            self.history.refuse(f"{what} of row {number}, which is not live", number)
        return row

    # ---- the step ---------------------------------------------------------------------------

    def _compute_chunk(self, row: PlanRow, chunk: Chunk) -> RowChunk:
        number, count, drafts = chunk
        refuse, start, end = self.history.refuse, row.num_computed, row.num_computed + count
        if row.num_drafts:
            self._refuse_work(row)
        if drafts and end != row.num_tokens + len(drafts):
            refuse(
                f"{chunk} does not end with its drafts: row {number} has {row.num_tokens} tokens",
                number,
            )
        if count < 1 or end > row.num_tokens + len(drafts):
            refuse(f"a chunk of row {number} ends beyond its {row.num_tokens} tokens", number)
        row.num_computed, row.num_drafts = end - len(drafts), len(drafts)
        return RowChunk(row, start, end, drafts)

    def _refuse_work(self, row: PlanRow) -> NoReturn:
        """Refuse a row that computes while its drafts are in flight, or that decodes although it
        does not lack exactly one token."""
        number, fault = row.number, "computes while its drafts are in flight"
        if not row.num_drafts:
            fault = (
                f"decodes implicitly, but {row.num_computed} of its {row.num_tokens} tokens are"
                " computed"
            )
        self.history.refuse(f"row {number} {fault}", number)

    def _join(self, row: PlanRow, source: PlanRow, step: ComputedRows) -> None:
        joins, refuse = f"row {row.number} joins row {source.number}", self.history.refuse
        if source not in step.sampling:
            refuse(f"{joins}, which closes no gap", row.number)
        if source.num_drafts:
            refuse(f"{joins}, which verifies drafts", row.number)
        if row.tables != source.tables:
            refuse(f"{joins}, but their tables are {row.tables} and {source.tables}", row.number)
        row.num_tokens, row.num_computed = source.num_tokens, source.num_computed
        step.sampling.append(row)
