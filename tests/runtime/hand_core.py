"""A hand-made core for hybrids: gives blocks to rows by kind, and makes plans of them.

It does what the contract of `core.step` says of each kind of group, in the plainest way, so that
the runner can be tried without a scheduler. What leaves a table is overwritten with NaN at once: a
block that is still read spoils every token after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    HOLE_BLOCK,
    BlockCopy,
    Chunk,
    DraftOrder,
    EditKind,
    RowAdmission,
    RowFork,
    StepPlan,
    StepResult,
    TableEdit,
    TokenLogprobs,
    TokenMasks,
)
from quire.runtime.model_runner import ModelRunner

NAN_BYTE = 255


@dataclass
class Snapshot:
    """What a prefix of so many tokens left: blocks of tokens, and copies of its states."""

    num_tokens: int
    tables: list[list[int]]


@dataclass
class Held:
    """A sequence in its row. tokens: prompt and what was sampled."""

    row: int
    tokens: list[int]
    num_prompt_tokens: int
    params: DecodingParams
    branch_index: int
    tables: list[list[int]]
    num_computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class HandCore:
    """plan: what the coming step changes, as it is gathered."""

    def __init__(
        self, runner: ModelRunner, groups: Sequence[KVGroup], num_blocks: int, block_size: int
    ) -> None:
        self.runner = runner
        self.groups = groups
        self.size = block_size
        self.storage = runner._kv_cache.storage
        self.storage.fill_(NAN_BYTE)
        self.ref_count = [0] * num_blocks
        self.live: list[Held] = []
        self._step_id = 0
        self._plan = StepPlan(0, 0, 0)
        self.drafted: dict[int, tuple[int, ...]] = {}  # of the last orders, by row

    # ---- blocks -----------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        free = [block for block, count in enumerate(self.ref_count) if not count][:count]
        assert len(free) == count, "the pool is too small for this test"
        for block in free:
            self.ref_count[block] = 1
        return free

    def share(self, blocks: Sequence[int]) -> list[int]:
        for block in blocks:
            if block != HOLE_BLOCK:
                self.ref_count[block] += 1
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != HOLE_BLOCK:
                self.ref_count[block] -= 1
                if not self.ref_count[block]:
                    self.storage[block].fill_(NAN_BYTE)

    @property
    def num_held(self) -> int:
        return sum(count > 0 for count in self.ref_count)

    def _add(self, **changes: object) -> None:
        for name, values in changes.items():
            self._plan = replace(self._plan, **{name: (*getattr(self._plan, name), *values)})

    # ---- sequences --------------------------------------------------------------------------

    def admit(
        self,
        tokens: Sequence[int],
        params: DecodingParams,
        prefix: Snapshot | None = None,
        *,
        num_prompt_tokens: int | None = None,
        branch_index: int = 0,
    ) -> Held:
        row = next(row for row in range(99) if row not in {held.row for held in self.live})
        num_prompt_tokens = num_prompt_tokens or len(tokens)
        tables: list[list[int]] = [[] for _ in self.groups]
        held = Held(row, list(tokens), num_prompt_tokens, params, branch_index, tables)
        for group, kind in enumerate(self.groups):
            if kind.kind is KVKind.STATE:
                tables[group] = self.take(kind.num_state_blocks)
            if prefix is not None:
                self._take_prefix(held, group, prefix)
        if prefix is not None:
            held.num_computed = prefix.num_tokens
        self._add(
            admit=(
                RowAdmission(
                    row,
                    list(tokens),
                    num_prompt_tokens,
                    held.num_computed,
                    tuple(map(tuple, tables)),
                    params,
                    branch_index,
                ),
            )
        )
        self.live.append(held)
        return held

    def _take_prefix(self, held: Held, group: int, prefix: Snapshot) -> None:
        theirs = prefix.tables[group]
        if self.groups[group].kind is KVKind.STATE:
            copies = map(BlockCopy, theirs, held.tables[group])
            self._add(copies=tuple(copies))
        else:
            held.tables[group] = self.share(theirs)

    def snapshot(self, held: Held) -> Snapshot:
        """Of a sequence that stands at the end of a block; its states are copied in the next step,
        before that writes them."""
        assert held.num_computed % self.size == 0
        tables: list[list[int]] = []
        for group, table in zip(self.groups, held.tables, strict=True):
            if group.kind is KVKind.STATE:
                tables.append(self.take(len(table)))
                self._add(copies=tuple(map(BlockCopy, table, tables[-1])))
            else:
                tables.append(self.share(table[: held.num_computed // self.size]))
        return Snapshot(held.num_computed, tables)

    def fork(
        self, source: Held, params: DecodingParams, branch_index: int, *, joins_step: bool = False
    ) -> Held:
        """A branch. One that joins the step shares all blocks until it writes (`part`)."""
        row = next(row for row in range(99) if row not in {held.row for held in self.live})
        self._add(forks=(RowFork(row, source.row, params, branch_index, joins_step),))
        held = replace(
            source,
            row=row,
            tokens=list(source.tokens),
            params=params,
            branch_index=branch_index,
            tables=[self.share(table) for table in source.tables],
            logprobs=[],
            entries=[],
        )
        self.live.append(held)
        return held

    def part(self, held: Held) -> None:
        """Copies of its own for what the next step writes: states, and a partly filled block."""
        for index, (group, table) in enumerate(zip(self.groups, held.tables, strict=True)):
            first, count = held.num_computed // self.size, int(held.num_computed % self.size > 0)
            if group.kind is KVKind.STATE:
                first, count = 0, len(table)
            old = table[first : first + count]
            if not old:
                continue
            new = self.take(len(old))
            table[first : first + count] = new
            edit = TableEdit(held.row, index, EditKind.REPLACE, first, tuple(new))
            self._add(table_edits=(edit,), copies=tuple(map(BlockCopy, old, new)))
            for block in old:
                self.ref_count[block] -= 1
                assert self.ref_count[block], "what is copied from is held by others"

    def drop(self, held: Held) -> None:
        self._add(release=(held.row,))
        for table in held.tables:
            self.release(table)
        self.live.remove(held)

    def forget(self, snapshot: Snapshot) -> None:
        for table in snapshot.tables:
            self.release(table)

    # ---- steps ------------------------------------------------------------------------------

    def step(
        self,
        counts: dict[int, int] | None = None,
        joins: Sequence[tuple[Held, Held]] = (),
        drafts: dict[int, tuple[int, ...]] | None = None,
        masks: TokenMasks | None = None,
        orders: dict[int, int] | None = None,
    ) -> StepResult:
        """All live sequences compute what is left of their tokens, or what counts says by row.
        joins: (branch, source) that join this step. drafts: by row, of rows that close their gap.
        orders: by row, how many drafts the runner's drafter is to make, which are verified.
        """
        counts, drafts = counts or {}, drafts or {}
        if orders:
            drafts = drafts | self._order(orders)
        joining = {branch.row for branch, _ in joins}
        sizes: dict[int, int] = {}
        for held in self.live:
            if held.row not in joining:
                gap = len(held.tokens) - held.num_computed
                sizes[held.row] = min(gap, counts.get(held.row, gap))
                sizes[held.row] += len(drafts.get(held.row, ()))
                self._grow(held, held.num_computed + sizes[held.row])
        for branch, source in joins:
            for index, group in enumerate(self.groups):
                if group.kind is not KVKind.STATE:
                    more = source.tables[index][len(branch.tables[index]) :]
                    self._append(branch, index, self.share(more))
        plan = replace(
            self._plan,
            step_id=self._step_id,
            num_rows=len(self.live),
            num_tokens=sum(sizes.values()),
            chunks=tuple(
                Chunk(row, size, drafts.get(row, ())) for row, size in sizes.items() if size != 1
            ),
        )
        self._step_id, self._plan = self._step_id + 1, StepPlan(0, 0, 0)
        self.runner.execute(plan)
        self.runner.sample(masks)
        result = self.runner.result()
        assert not result.failed
        self._apply(result, sizes, joins)
        return result

    def _order(self, orders: dict[int, int]) -> dict[int, tuple[int, ...]]:
        for held in self.live:
            self._grow(held, len(held.tokens) + orders.get(held.row, 0))
        self._plan = replace(
            self._plan,
            step_id=self._step_id,
            num_rows=len(self.live),
            draft_orders=tuple(DraftOrder(row, count, 1000) for row, count in orders.items()),
        )
        found = self.runner.draft(self._plan).of_rows
        self.drafted = {row: drafted.token_ids for row, drafted in found.items()}
        return self.drafted

    def _append(self, held: Held, group: int, blocks: list[int]) -> None:
        if blocks:
            edit = TableEdit(
                held.row, group, EditKind.APPEND, len(held.tables[group]), tuple(blocks)
            )
            self._add(table_edits=(edit,))
            held.tables[group] += blocks

    def _grow(self, held: Held, num_tokens: int) -> None:
        for index, group in enumerate(self.groups):
            if group.kind is not KVKind.STATE:
                missing = -(-num_tokens // self.size) - len(held.tables[index])
                self._append(held, index, self.take(max(0, missing)))

    def _apply(
        self, result: StepResult, sizes: dict[int, int], joins: Sequence[tuple[Held, Held]]
    ) -> None:
        by_row = dict(zip(result.rows, result.token_ids, strict=True))
        for branch, source in joins:
            branch.num_computed = source.num_computed + sizes[source.row]
        for held in self.live:
            held.num_computed += sizes.get(held.row, 0)
            if held.row in by_row:
                held.tokens += by_row[held.row]
                held.num_computed = len(held.tokens) - 1
                held.entries += result.logprobs.get(held.row, ())
                held.logprobs = [entry.logprob for entry in held.entries]
        for held in self.live:
            self._pass_windows(held)

    def _pass_windows(self, held: Held) -> None:
        """Blocks that no later token sees become holes."""
        for index, group in enumerate(self.groups):
            if group.window is None:
                continue
            num_passed = max(0, held.num_computed - group.window + 1) // self.size
            table = held.tables[index]
            first = next((at for at in range(num_passed) if table[at] != HOLE_BLOCK), num_passed)
            count = num_passed - first
            if count:
                holes = (HOLE_BLOCK,) * count
                self.release(table[first:num_passed])
                table[first:num_passed] = holes
                edit = TableEdit(held.row, index, EditKind.HOLE, first, holes)
                self._add(table_edits=(edit,))
