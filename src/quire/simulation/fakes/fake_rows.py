"""The fake runner's rows and block tables, which refuse impossible plans.

This module maps tokens to the slots that a step reads and writes; `fake_runner` runs the forward
pass. A refusal is an AssertionError that lists the row's changes in the last plans.
"""

from collections import deque
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from quire.core.adapters import NO_SLOT
from quire.core.content_spans import spans_between
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import (
    HOLE_BLOCK,
    Chunk,
    EditKind,
    ItemLoad,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)
from quire.simulation.fakes.fake_model import (
    adapter_start,
    branch_salt,
    extend,
    fingerprints_of,
)

NUM_REMEMBERED_PLANS = 32

Ints = npt.NDArray[np.int64]


class PlanHistory:
    """The last plans, which the error messages of refusals list."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque(maxlen=NUM_REMEMBERED_PLANS)

    def add(self, plan: StepPlan) -> None:
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


class FakeRows:
    """Arrays with one permanent row for each live sequence.

    Invariant: table_count[block] is the number of times that the block occurs in the tables of live
    rows, without the rows in `joining`.
    """

    def __init__(
        self,
        history: PlanHistory,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        max_num_rows: int,
        max_num_tokens: int,
    ) -> None:
        num_slots = -(-max_num_tokens // block_size) * block_size
        num_groups = len(groups)
        self.history = history
        self.groups = groups
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_tokens = max_num_tokens
        self.live = np.zeros(max_num_rows, dtype=np.bool_)
        #: Incremented when a row gets a new sequence, to recognize late tokens of the previous one.
        self.epoch: Ints = np.zeros(max_num_rows, dtype=np.int64)
        #: The number of a row's tokens, including tokens that steps in flight will append.
        self.num_tokens: Ints = np.zeros(max_num_rows, dtype=np.int64)
        self.num_computed: Ints = np.zeros(max_num_rows, dtype=np.int64)
        #: The maximum of `num_computed` since the row's admission.
        self.num_ever_computed: Ints = np.zeros(max_num_rows, dtype=np.int64)
        #: The number of a row's drafts that a step in flight verifies. `num_tokens` and
        #: `num_computed` count as if all were rejected, until the result is known.
        self.num_drafts: Ints = np.zeros(max_num_rows, dtype=np.int64)
        #: Maps the row of each fork that joins the step to its source row, from whose logits it
        #: samples. The fork's tables are counted after the step's accesses are known, since the
        #: source row writes the blocks for it.
        self.joining: dict[int, int] = {}
        self._new: list[tuple[int, int]] = []  # (block, row) of blocks that this plan assigns
        #: At [group, row], the number of tokens for which the row's table has slots.
        self.num_table_tokens: Ints = np.zeros((num_groups, max_num_rows), dtype=np.int64)
        #: The `branch_salt` of each row.
        self.salts = np.zeros(max_num_rows, dtype=np.uint64)
        #: At [row, i], the fingerprint of the row's tokens 0 to i.
        self.fingerprints = np.zeros((max_num_rows, max_num_tokens), dtype=np.uint64)
        #: At [group, row, i], the slot of token i; negative without a slot, as in groups of states.
        self.slots: Ints = np.full((num_groups, max_num_rows, num_slots), -1, dtype=np.int64)
        self.table_count: Ints = np.zeros(num_blocks, dtype=np.int64)
        self.admission: list[RowAdmission | None] = [None] * max_num_rows
        #: The digest of the adapter in each slot. A row is admitted after its adapter is loaded.
        self.adapters: dict[int, str] = {}
        #: The digest of the content in each slot.
        self.contents: dict[int, str] = {}
        #: The position after the last span of contents of each row.
        self.contents_end: Ints = np.zeros(max_num_rows, dtype=np.int64)
        self.tables: tuple[list[list[int]], ...] = tuple(
            [[] for _ in range(max_num_rows)] for _ in range(num_groups)
        )

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.live))

    def reset(self) -> None:
        """Drop all rows."""
        self.joining.clear()
        self._new.clear()
        self.contents.clear()
        for row in np.flatnonzero(self.live).tolist():
            self.release(row)

    def release(self, row: int) -> None:
        self._check_live(row, "release")
        self.live[row] = False
        self.num_drafts[row] = 0
        for group, tables in enumerate(self.tables):
            self._count(row, tables[row], -1)
            tables[row] = []
            self.slots[group, row] = -1
            self.num_table_tokens[group, row] = 0

    def pop_new_blocks(self) -> list[int]:
        """The new, empty blocks that rows have got since the last call.

        After all edits of a plan, each of these blocks must be in exactly one row's table.
        """
        new, self._new = self._new, []
        for block, row in new:
            if self.table_count[block] > 1:
                self.history.refuse(
                    f"block {block} is given to row {row} as new, but held: {self.holders(block)}",
                    row,
                )
        return [block for block, _ in new]

    def admit(self, admission: RowAdmission) -> None:
        """Fill a free row. In its tables, new blocks follow the blocks of computed tokens."""
        # First, refuse an impossible admission.
        row, refuse = admission.row, self.history.refuse
        num_tokens, computed = len(admission.token_ids), admission.num_computed_tokens
        if not 0 <= row < len(self.live):
            refuse(f"admission into row {row} of {len(self.live)}", row)
        if self.live[row]:
            refuse(f"admission into row {row}, which is live", row)
        if not 0 <= computed < num_tokens <= self.max_num_tokens:
            refuse(f"admission with {computed} of {num_tokens} tokens computed", row)
        if not 0 < admission.num_prompt_tokens <= num_tokens:
            refuse(f"admission with {admission.num_prompt_tokens} prompt tokens", row)
        if len(admission.block_tables) != len(self.tables):
            refuse(f"admission with {len(admission.block_tables)} tables", row)
        # Then, set the row's tokens and its tables.
        self.live[row] = True
        self.epoch[row] += 1
        self.admission[row] = admission._replace(token_ids=tuple(admission.token_ids))
        self.num_tokens[row], self.num_computed[row] = num_tokens, computed
        self.num_ever_computed[row] = computed
        self.salts[row] = branch_salt(admission.params.seed, admission.branch_index)
        slot = admission.adapter_slot
        if slot != NO_SLOT and slot not in self.adapters:
            self.history.refuse(f"nothing is in slot {slot} of adapters", row)
        start = adapter_start(self.adapters.get(slot, ""))
        spans = admission.content_spans
        self.contents_end[row] = spans[-1].end if spans else 0
        self.fingerprints[row, :num_tokens] = fingerprints_of(admission.token_ids, start, spans)
        for group, table in enumerate(admission.block_tables):
            first_new = -(-computed // self.block_size)
            if self.groups[group].kind is KVKind.STATE:
                num_blocks = self.groups[group].num_state_blocks
                if len(table) != num_blocks:
                    refuse(f"a state takes {num_blocks} blocks, but its table has {table}", row)
                first_new = num_blocks if computed else 0
            elif len(table) * self.block_size < computed:
                refuse(
                    f"{computed} tokens are computed, but the table has {len(table)} blocks", row
                )
            self._write_ids(row, group, 0, table[:first_new])
            self._append_new(row, group, table[first_new:])

    def load_adapters(self, loads: tuple[ItemLoad, ...]) -> None:
        """Load adapters into slots, which no live row may use."""
        for slot, digest in loads:
            for row in np.flatnonzero(self.live).tolist():
                admission = self.admission[row]
                if admission is not None and admission.adapter_slot == slot:
                    self.history.refuse(f"slot {slot}, which row {row} uses, gets {digest!r}", row)
            self.adapters[slot] = digest

    def check_contents(self, rows: Ints, starts: Ints, ends: Ints) -> None:
        """Refuse a step that computes positions of a content which is in no slot."""
        for index in np.flatnonzero(starts < self.contents_end[rows]).tolist():
            row = int(rows[index])
            admission = self.admission[row]
            assert admission is not None
            for span in spans_between(
                admission.content_spans, int(starts[index]), int(ends[index])
            ):
                if span.digest not in self.contents.values():
                    self.history.refuse(f"row {row} reads {span}, which no slot has", row)

    def fork(self, fork: RowFork) -> None:
        """Copy the state of a live row into a free one."""
        row, source = fork.row, fork.source_row
        if not 0 <= row < len(self.live) or self.live[row]:
            self.history.refuse(f"fork into row {row}, which is not free", row)
        self._check_live(source, f"fork into row {row}")
        admission = self.admission[source]
        assert admission is not None
        self.live[row] = True
        self.epoch[row] += 1
        self.admission[row] = admission._replace(
            row=row, params=fork.params, branch_index=fork.branch_index
        )
        self.salts[row] = branch_salt(fork.params.seed, fork.branch_index)
        for counts in (
            self.num_tokens,
            self.num_computed,
            self.num_ever_computed,
            self.contents_end,
        ):
            counts[row] = counts[source]
        self.fingerprints[row] = self.fingerprints[source]
        if fork.joins_step:
            self.joining[row] = source
        for group, tables in enumerate(self.tables):
            self._write_ids(row, group, 0, tables[source])

    def count_joined(self) -> None:
        """Count the tables of forks that joined. A fork's tables must equal its source row's."""
        joined, self.joining = self.joining, {}
        for row, source in joined.items():
            for tables in self.tables:
                if tables[row] != tables[source]:
                    self.history.refuse(
                        f"row {row} joins row {source}, but their tables are {tables[row]} and"
                        f" {tables[source]}",
                        row,
                    )
                self._count(row, tables[row], 1)

    def edit_tokens(self, edit: TokenEdit) -> None:
        """Replace a row's tokens from one position on."""
        row, first, token_ids = edit
        self._check_live(row, "token edit")
        num_tokens = first + len(token_ids)
        if not (0 < first <= self.num_tokens[row] and num_tokens <= self.max_num_tokens):
            self.history.refuse(f"{edit} of a row with {self.num_tokens[row]} tokens", row)
        if first < self.num_ever_computed[row] or num_tokens <= self.num_computed[row]:
            self.history.refuse(
                f"{edit} replaces computed ones: {self.num_ever_computed[row]} were, and"
                f" {self.num_computed[row]} are",
                row,
            )
        fingerprint = int(self.fingerprints[row, first - 1])
        for position, token_id in enumerate(token_ids, first):
            fingerprint = extend(fingerprint, token_id)
            self.fingerprints[row, position] = fingerprint
        self.num_tokens[row] = num_tokens

    def add_drafts(self, chunk: Chunk) -> None:
        """Write the fingerprints of drafts behind a row's tokens, which the chunk computes."""
        row, num_new, drafts = chunk
        refuse, num_tokens = self.history.refuse, int(self.num_tokens[row])
        if any(group.kind is KVKind.STATE for group in self.groups):
            refuse(f"{chunk} has drafts, but a state can't be cut behind those accepted", row)
        if self.num_computed[row] + num_new != num_tokens + len(drafts):
            refuse(f"{chunk} does not end with its drafts: row {row} has {num_tokens} tokens", row)
        if num_tokens + len(drafts) >= self.max_num_tokens:
            refuse(f"{chunk} leaves no room for a token: row {row} has {num_tokens} tokens", row)
        fingerprint = int(self.fingerprints[row, num_tokens - 1])
        for position, token_id in enumerate(drafts, num_tokens):
            fingerprint = extend(fingerprint, token_id)
            self.fingerprints[row, position] = fingerprint
        self.num_drafts[row] = len(drafts)

    def end_drafts(self, row: int, sampled: list[tuple[int, int]]) -> None:
        """Add to a row's tokens the ones sampled after the first, which confirm its drafts.

        `sampled` has the tokens with the fingerprints before them. Rejected drafts become part of
        no later fingerprint.
        """
        self.num_drafts[row] = 0
        self.num_tokens[row] += len(sampled) - 1
        self.num_computed[row] += len(sampled) - 1
        self.fingerprints[row, self.num_tokens[row] - 1] = extend(*sampled[-1])

    def edit(self, edit: TableEdit) -> None:
        """Change a table."""
        row, group, kind, first, ids = edit
        self._check_live(row, "table edit")
        table = self.tables[group][row]
        if self.groups[group].kind is KVKind.STATE and kind is not EditKind.REPLACE:
            self.history.refuse(f"{kind.value} of a state: {edit}", row)
        if kind is EditKind.APPEND:
            if first != len(table):
                self.history.refuse(f"APPEND at {first} to a table of {len(table)} blocks", row)
            self._append_new(row, group, ids)
            return
        if first + len(ids) > len(table):
            self.history.refuse(f"{kind.value} beyond a table of {len(table)} blocks", row)
        if kind is EditKind.TRUNCATE:
            if self.num_drafts[row]:
                self.history.refuse(f"{edit} of a row whose drafts are in flight", row)
            self.num_computed[row] = min(self.num_computed[row], first * self.block_size)
            self._count(row, table[first:], -1)
            del table[first:]
            self.slots[group, row, first * self.block_size :] = -1
            self.num_table_tokens[group, row] = first * self.block_size
            return
        self._count(row, table[first : first + len(ids)], -1)
        if kind is EditKind.HOLE and any(block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"a hole names blocks: {ids}", row)
        if kind is EditKind.REPLACE and HOLE_BLOCK in ids:
            self.history.refuse(f"replaced by a hole: {edit}", row)
        self._write_ids(row, group, first, ids)

    def _append_new(self, row: int, group: int, ids: tuple[int, ...]) -> None:
        if HOLE_BLOCK in ids:
            self.history.refuse(f"a hole is given to row {row} as a new block: {ids}", row)
        self._write_ids(row, group, len(self.tables[group][row]), ids)
        if row not in self.joining:  # a joining row has the blocks of its source
            self._new += [(block, row) for block in ids]

    def _write_ids(
        self, row: int, group: int, first: int, ids: list[int] | tuple[int, ...]
    ) -> None:
        """Write block ids into a table, starting at index `first`. HOLE_BLOCK has no slots."""
        if not ids:
            return
        size, description = self.block_size, self.groups[group]
        if HOLE_BLOCK in ids and description.kind is not KVKind.WINDOW:
            self.history.refuse(f"a hole in group {group}, which is read whole: {ids}", row)
        if any(not 0 <= block < self.num_blocks and block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"block ids {ids}, but the pool has {self.num_blocks}", row)
        has_slots = description.kind is not KVKind.STATE
        if has_slots and (first + len(ids)) * size > self.slots.shape[2]:
            self.history.refuse(f"a table of {first + len(ids)} blocks is beyond its bound", row)
        table = self.tables[group][row]
        table[first : first + len(ids)] = ids
        self._count(row, ids, 1)
        if not has_slots:
            return
        blocks = np.array(ids, dtype=np.int64)
        slots = blocks[:, None] * size + np.arange(size)
        slots[blocks == HOLE_BLOCK] = -1
        self.slots[group, row, first * size : (first + len(ids)) * size] = slots.reshape(-1)
        self.num_table_tokens[group, row] = len(table) * size

    def check_unshared(self, writers: Ints, blocks: Ints) -> None:
        """Refuse a step that writes into a shared block. Row `writers[i]` writes into `blocks[i]`.

        A block is shared if it occurs in another row's table, or more than once in the row's
        tables.
        """
        shared = self.table_count[blocks] != 1
        if shared.any():
            row, block = int(writers[shared][0]), int(blocks[shared][0])
            self.history.refuse(
                f"row {row} would write into block {block}, which is shared:"
                f" {self.holders(block)} name it",
                row,
            )

    def holders(self, block: int) -> str:
        """Text for error messages: the (row, group) pairs whose tables contain a block."""
        found = [
            (row, group)
            for group, tables in enumerate(self.tables)
            for row, table in enumerate(tables)
            if block in table
        ]
        return f"the tables of (row, group) {found}"

    def _count(self, row: int, ids: list[int] | tuple[int, ...], by: int) -> None:
        if row in self.joining:
            return
        for block in ids:
            if block != HOLE_BLOCK:
                self.table_count[block] += by

    def _check_live(self, row: int, what: str) -> None:
        if not (0 <= row < len(self.live) and self.live[row]):
            self.history.refuse(f"{what} of row {row}, which is not live", row)
