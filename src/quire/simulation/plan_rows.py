"""The rows of all live sequences, as the plans of steps change them.

`PlanRows` carries out plans on counts of tokens and on block tables; it has no token ids. With it,
`planned_work` counts the work of steps. `fakes.fake_rows` adds the tokens' fingerprints, with which
`fakes.fake_runner` checks what steps read and write. A plan that contradicts the rows is refused:
an AssertionError lists the row's changes in the last plans. The rest of the simulation reads plans
through this file alone.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from quire.core.step import (
    HOLE_BLOCK,
    BlockCopy,
    Chunk,
    EditKind,
    ItemLoad,
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


def plan_bytes(plan: StepPlan) -> bytes:
    """The bytes of a plan for digests. They are equal in different processes."""
    admissions = [(*admission[:5], admission.branch_index) for admission in plan.admit]
    forks = [(fork.row, fork.source_row, fork.branch_index, fork.joins_step) for fork in plan.forks]
    token_edits = [tuple(edit) for edit in plan.token_edits]
    edits = [(edit[0], edit[1], edit.kind.value, *edit[3:]) for edit in plan.table_edits]
    chunks = [tuple(chunk) for chunk in plan.chunks]
    head = (plan.step_id, plan.num_rows, plan.num_tokens, plan.release)
    rows = (admissions, forks, token_edits, edits, chunks)
    loads = [loads for loads in (plan.adapter_loads, plan.content_loads) if loads]
    return repr((head, rows, plan.copies, *loads)).encode()


class PlanCounts(NamedTuple):
    """Counts of a plan's changes."""

    num_releases: int
    #: Sequences that enter rows, forks included.
    num_admissions: int
    #: Tokens of the admitted sequences, except forks.
    num_admitted_tokens: int
    #: Blocks in the tables of the admitted sequences, except forks.
    num_admitted_blocks: int
    num_joined_forks: int
    #: Blocks that table edits append, and blocks that replace other blocks.
    num_appended_blocks: int
    num_replaced_blocks: int
    num_copies: int
    #: Admissions whose first table names the target of a copy.
    num_partial_hits: int


def count_changes(plan: StepPlan) -> PlanCounts:
    """Count a plan's changes, whether or not they have been carried out."""
    of_kind = dict.fromkeys(EditKind, 0)
    for edit in plan.table_edits:
        of_kind[edit.kind] += len(edit.block_ids)
    targets = {copy.target for copy in plan.copies}
    return PlanCounts(
        num_releases=len(plan.release),
        num_admissions=len(plan.admit) + len(plan.forks),
        num_admitted_tokens=sum(len(each.token_ids) for each in plan.admit),
        num_admitted_blocks=sum(len(table) for each in plan.admit for table in each.block_tables),
        num_joined_forks=sum(fork.joins_step for fork in plan.forks),
        num_appended_blocks=of_kind[EditKind.APPEND],
        num_replaced_blocks=of_kind[EditKind.REPLACE],
        num_copies=len(plan.copies),
        num_partial_hits=sum(not targets.isdisjoint(each.block_tables[0]) for each in plan.admit),
    )


@dataclass(slots=True, eq=False)
class PlanRow:
    """A live row. The next sequence with the same row number has another `PlanRow`."""

    #: The row's number in plans.
    number: int
    #: The row's admission; for a fork, its source row's admission with the fork's parameters.
    admission: RowAdmission
    #: The number of the row's tokens, including tokens that steps in flight will append.
    num_tokens: int
    num_computed: int
    #: The block table of each KV group.
    tables: list[list[int]]
    #: The largest value of `num_computed` before a TRUNCATE lowered it; 0 without a TRUNCATE.
    num_cut: int = 0
    #: The number of drafts that a step in flight verifies. `num_tokens` and `num_computed` count as
    #: if all were rejected, until `PlanRows.land`.
    num_drafts: int = 0
    #: The number of the row's last tokens that steps in flight will sample; see `PlanRows.land`.
    num_unknown: int = 0


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
    #: The chunks that compute tokens, by row number and in the plan's order.
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
        #: Maps the row of each fork that joins the step of the last plan to its source row.
        self.joining: dict[int, int] = {}
        #: The block copies of the last plan.
        self.copies: tuple[BlockCopy, ...] = ()

    def reset(self) -> None:
        """Drop all rows."""
        self.live.clear()
        self.num_holders.clear()
        self.num_common.clear()

    def change(self, plan: StepPlan) -> None:
        """Carry out a plan's changes. Adapters are loaded before rows are admitted, which makes no
        difference to rows that use other slots."""
        live = self.live
        self.history.add(plan)
        self.joining = {fork.row: fork.source_row for fork in plan.forks if fork.joins_step}
        for number in plan.release:
            self._count_tables(self._row(number, "release"), -1)
            del live[number]
        for load in plan.adapter_loads:
            self.load_adapter(load)
        for admission in plan.admit:
            self.admit(admission)
        for fork in plan.forks:
            self.fork(fork)
        for token_edit in plan.token_edits:
            self.edit_tokens(token_edit)
        for table_edit in plan.table_edits:
            self.edit_table(table_edit)
        for load in plan.content_loads:
            self.load_content(load)
        self.copies = plan.copies
        if len(live) != plan.num_rows:
            self.history.refuse(f"{len(live)} rows live, the plan says {plan.num_rows}")

    def compute(self, plan: StepPlan) -> ComputedRows:
        """Count the step's tokens as computed, and one more token for each row that samples.

        The plan's changes have been made. Drafts are counted when `land` is called.
        """
        # First, compute the chunks.
        live, refuse, step = self.live, self.history.refuse, ComputedRows()
        named: set[int] = set()
        for chunk in plan.chunks:
            if chunk.row not in live or chunk.row in self.joining or chunk.row in named:
                refuse(f"{chunk} names a row that is not live, or twice", chunk.row)
            named.add(chunk.row)
            if chunk.num_new_tokens:
                step.chunks[chunk.row] = self._compute_chunk(live[chunk.row], chunk)
        # Then, let all rows decode that neither have a chunk nor join. A row without uncomputed
        # tokens samples.
        for number, row in live.items():
            if number in named:
                if number not in step.chunks or row.num_computed < row.num_tokens:
                    continue
            elif number in self.joining:
                continue
            else:
                if row.num_tokens - row.num_computed != 1 or row.num_drafts:
                    self._refuse_work(row)
                row.num_computed += 1
                step.decodes.append(row)
            row.num_tokens += 1
            row.num_unknown += 1
            step.sampling.append(row)
        num_tokens = sum(chunk.end - chunk.start for chunk in step.chunks.values())
        num_tokens += len(step.decodes)
        if num_tokens != plan.num_tokens:
            refuse(f"{num_tokens} tokens to compute, the plan says {plan.num_tokens}")
        if not num_tokens:
            refuse("a step that computes nothing")
        # Finally, let forks join: they sample from their source rows' logits.
        for number, source_number in self.joining.items():
            self._join(live[number], live[source_number], step)
        return step

    def land(self, row: PlanRow, num_accepted: int, *, are_computed: bool = True) -> None:
        """Note that the oldest step in flight has sampled a row, and count its accepted drafts as
        tokens.

        are_computed: whether the drafts count as computed, too. In models with states they don't.
        """
        row.num_drafts = 0
        row.num_unknown -= 1
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

    def load_adapter(self, load: ItemLoad) -> None:
        """Ignore the load of an adapter. Subclasses may check it."""

    def load_content(self, load: ItemLoad) -> None:
        """Ignore the load of a content. Subclasses may check it."""

    def admit(self, admission: RowAdmission) -> PlanRow:
        """Add a row. Returns it."""
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
        return row

    def fork(self, fork: RowFork) -> None:
        """Add a row that is a copy of another."""
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

    def edit_tokens(self, edit: TokenEdit) -> None:
        """Change the number of a row's tokens."""
        row, first = self._row(edit.row, "token edit"), edit.first_position
        if not 0 < first <= row.num_tokens:
            self.history.refuse(f"{edit} of a row with {row.num_tokens} tokens", edit.row)
        num_tokens = first + len(edit.token_ids)
        if first < max(row.num_cut, row.num_computed) or num_tokens <= row.num_computed:
            self.history.refuse(
                f"{edit} replaces computed tokens: {row.num_computed} are computed, and"
                f" {row.num_cut} were computed before a table was truncated",
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
            refuse(f"{joins}, which does not sample in this step", row.number)
        if source.num_drafts:
            refuse(f"{joins}, which verifies drafts", row.number)
        if row.tables != source.tables:
            refuse(f"{joins}, but their tables are {row.tables} and {source.tables}", row.number)
        row.num_tokens, row.num_computed = source.num_tokens, source.num_computed
        row.num_unknown += 1
        step.sampling.append(row)
