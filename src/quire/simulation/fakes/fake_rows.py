"""The rows of a fake runner: fingerprints of their tokens, and bounds of their plans.

`plan_rows` has the checks of plans against the rows. This module checks the sizes of the device,
the kinds of its KV groups, and the adapters and contents in its slots. Only `fake_runner` uses it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from quire.core.adapters import NO_SLOT
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import (
    HOLE_BLOCK,
    EditKind,
    ItemLoad,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)
from quire.simulation.fakes.fake_model import (
    Fingerprints,
    adapter_start,
    extend_all,
    fingerprints_of,
)
from quire.simulation.plan_rows import PlanRow, PlanRows


class FakeRows(PlanRows):
    """Rows with the fingerprints of their tokens. Refuses plans that the device can't carry out.

    Invariant: fingerprints[row][i] is the fingerprint of the row's tokens 0 to i. Each sequence has
    an array of its own, so that late tokens of the previous one don't change it.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        max_num_rows: int,
        max_num_tokens: int,
    ) -> None:
        super().__init__(block_size)
        self.groups = groups
        self.num_blocks = num_blocks
        self.max_num_rows = max_num_rows
        #: Maximum number of tokens of a row.
        self.max_num_tokens = max_num_tokens
        #: A function that is called with the digest of each adapter that a plan loads.
        self.take_adapter: Callable[[str], object] = lambda digest: None
        #: A function that is called with the digest of each content that a plan loads.
        self.take_content: Callable[[str], object] = lambda digest: None
        self.fingerprints: dict[int, Fingerprints] = {}
        #: The digests of the contents in slots.
        self.contents: dict[int, str] = {}
        #: The blocks to which the last plan gives new content: those that are new in a table, and
        #: the targets of copies.
        self.assigned_blocks: list[int] = []
        self._adapters: dict[int, str] = {}
        self._new_blocks: list[tuple[int, int]] = []  # (block, row)
        # The number of times that each block occurs in the tables of forks that join this step:
        # their source rows may write into these blocks.
        self._num_joining: Counter[int] = Counter()

    def reset(self) -> None:
        """Drop all rows and contents. Adapters stay."""
        super().reset()
        self.contents.clear()

    def change(self, plan: StepPlan) -> None:
        """See `PlanRows`. Also checks the blocks that the plan assigns."""
        self._new_blocks = []
        super().change(plan)
        self._num_joining = Counter(
            block for row in self.joining for table in self.live[row].tables for block in table
        )
        for block, number in self._new_blocks:
            if self._num_holders(block) > 1:
                holders = self.holders(block)
                self.history.refuse(
                    f"block {block} is given to row {number} as new, but held: {holders}", number
                )
        self._check_copies({block for block, _ in self._new_blocks})
        self.assigned_blocks = [block for block, _ in self._new_blocks]
        self.assigned_blocks += [copy.target for copy in self.copies]

    # ---- the plan's changes -----------------------------------------------------------------

    def load_adapter(self, load: ItemLoad) -> None:
        """Load an adapter into a slot, which no live row may use."""
        slot, digest = load
        self.take_adapter(digest)
        for number, row in self.live.items():
            if row.admission.adapter_slot == slot:
                self.history.refuse(
                    f"slot {slot}, which row {number} uses, gets {digest!r}", number
                )
        self._adapters[slot] = digest

    def load_content(self, load: ItemLoad) -> None:
        """Load a content into a slot."""
        self.take_content(load.digest)
        self.contents[load.slot] = load.digest

    def admit(self, admission: RowAdmission) -> PlanRow:
        """See `PlanRows`."""
        self._check_admission(admission)
        row = super().admit(admission)
        slot, token_ids = admission.adapter_slot, row.admission.token_ids
        if slot != NO_SLOT and slot not in self._adapters:
            self.history.refuse(f"nothing is in slot {slot} of adapters", admission.row)
        # Later tokens need room, too.
        found = np.zeros(self.max_num_tokens + 1, dtype=np.uint64)
        start = adapter_start(self._adapters.get(slot, ""))
        found[: len(token_ids)] = fingerprints_of(token_ids, start, admission.content_spans)
        self.fingerprints[admission.row] = found
        return row

    def fork(self, fork: RowFork) -> None:
        """See `PlanRows`."""
        if not 0 <= fork.row < self.max_num_rows:
            self.history.refuse(f"fork into row {fork.row}, which is not free", fork.row)
        super().fork(fork)
        self.check_known(self.live[fork.source_row], f"fork into row {fork.row}")
        self.fingerprints[fork.row] = self.fingerprints[fork.source_row].copy()

    def edit_tokens(self, edit: TokenEdit) -> None:
        """See `PlanRows`."""
        row, first, token_ids = edit
        if first + len(token_ids) > self.max_num_tokens:
            self.history.refuse(f"{edit} of {self.max_num_tokens} places", row)
        super().edit_tokens(edit)
        self.check_known(self.live[row], "token edit")
        extend_all(self.fingerprints[row], first, token_ids)

    def edit_table(self, edit: TableEdit) -> None:
        """See `PlanRows`. A fork that joins the step gets the blocks of its source."""
        row, group, kind, first, ids = edit
        if self.groups[group].kind is KVKind.STATE and kind is not EditKind.REPLACE:
            self.history.refuse(f"{kind.value} of a state: {edit}", row)
        if kind is EditKind.APPEND:
            self._check_new(row, ids, is_shared=row in self.joining)
        if kind is EditKind.HOLE and any(block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"a hole names blocks: {ids}", row)
        if kind is EditKind.REPLACE and HOLE_BLOCK in ids:
            self.history.refuse(f"replaced by a hole: {edit}", row)
        self._check_blocks(row, group, first, ids)
        super().edit_table(edit)

    def check_known(self, row: PlanRow, what: str) -> None:
        """Refuse a change that needs all tokens of a row while a step in flight will add a token to
        the row."""
        if row.num_unknown:
            self.history.refuse(
                f"{what} of row {row.number}, whose last token is in flight", row.number
            )

    def check_unshared(self, row: int, blocks: list[int]) -> None:
        """Refuse writes into a block that occurs in another row's table, or more than once in the
        row's tables."""
        for block in blocks:
            if self._num_holders(block) != 1:
                self.history.refuse(
                    f"row {row} would write into block {block}, which is shared:"
                    f" {self.holders(block)} name it",
                    row,
                )

    def _check_admission(self, admission: RowAdmission) -> None:
        row, refuse = admission.row, self.history.refuse
        num_tokens, computed = len(admission.token_ids), admission.num_computed_tokens
        # First, check the numbers.
        if not 0 <= row < self.max_num_rows:
            refuse(f"admission into row {row} of {self.max_num_rows}", row)
        if not 0 <= computed < num_tokens <= self.max_num_tokens:
            refuse(f"admission with {computed} of {num_tokens} tokens computed", row)
        if not 0 < admission.num_prompt_tokens <= num_tokens:
            refuse(f"admission with {admission.num_prompt_tokens} prompt tokens", row)
        if len(admission.block_tables) != len(self.groups):
            refuse(f"admission with {len(admission.block_tables)} tables", row)
        # Then, check the tables. New blocks follow those that have data.
        for group, table in enumerate(admission.block_tables):
            num_filled = -(-computed // self.block_size)
            if self.groups[group].kind is KVKind.STATE:
                num_blocks = self.groups[group].num_state_blocks
                num_filled = num_blocks if computed else 0
                if len(table) != num_blocks:
                    refuse(f"a state takes {num_blocks} blocks, but its table has {table}", row)
            elif len(table) * self.block_size < computed:
                refuse(
                    f"{computed} tokens are computed, but the table has {len(table)} blocks", row
                )
            self._check_new(row, table[num_filled:])
            self._check_blocks(row, group, 0, table)

    def _check_new(self, row: int, ids: Sequence[int], *, is_shared: bool = False) -> None:
        """Check new blocks of a row. is_shared: they belong to the row that it joins."""
        if HOLE_BLOCK in ids:
            self.history.refuse(f"a hole is given to row {row} as a new block: {ids}", row)
        if not is_shared:
            self._new_blocks += [(block, row) for block in ids]

    def _check_blocks(self, row: int, group: int, first: int, ids: Sequence[int]) -> None:
        """Check blocks that enter a table at index `first`."""
        kind, end = self.groups[group].kind, first + len(ids)
        if HOLE_BLOCK in ids and kind is not KVKind.WINDOW:
            self.history.refuse(f"a hole in group {group}, which is read whole: {ids}", row)
        if any(not 0 <= block < self.num_blocks and block != HOLE_BLOCK for block in ids):
            self.history.refuse(f"block ids {ids}, but the pool has {self.num_blocks}", row)
        if ids and kind is not KVKind.STATE and (end - 1) * self.block_size >= self.max_num_tokens:
            self.history.refuse(f"a table of {end} blocks is beyond its bound", row)

    def _check_copies(self, new_blocks: set[int]) -> None:
        copies, refuse = self.copies, self.history.refuse
        sources, targets = {copy.source for copy in copies}, {copy.target for copy in copies}
        if len(targets) < len(copies):
            refuse(f"a block is the target of two copies: {copies}")
        if targets & sources:
            refuse(f"a block is the source and the target of a copy: {copies}")
        if sources & new_blocks:
            refuse(f"blocks {sources & new_blocks} are given out before they are copied")
        for block in targets:
            if self._num_holders(block) > 1:
                refuse(f"block {block} is copied to, but held: {self.holders(block)}")

    def _num_holders(self, block: int) -> int:
        """The number of times that a block occurs in tables, except for tables of joining forks."""
        found = -self._num_joining.get(block, 0)
        for holders in self.num_holders.values():
            found += holders.get(block, 0)
        return found
