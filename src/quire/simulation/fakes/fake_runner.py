"""A fake runner without a model, which catches misuse of the KV cache.

Each slot stores the fingerprint of the prefix that wrote it (`fake_store`). In each step, a row's
whole context is read back through its block tables and compared. So a block that was freed early,
shared wrongly or mapped wrongly raises an error at once. In a group with a window, all tokens in
the window are read, so that freeing a block too early raises. A recurrent state must be the state
after exactly the row's computed tokens. Tokens come from `FakeModel`, so outputs can be predicted.

To reveal errors of overlapped steps, the forward pass of a step runs as late as its `result`, but
the blocks that a later plan assigns are overwritten as soon as that plan is executed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import (
    BlockCopy,
    RowAdmission,
    StepPlan,
    StepResult,
    TokenMasks,
)
from quire.simulation.fakes.fake_model import (
    MASK,
    FakeModel,
    extend_array,
    mix,
)
from quire.simulation.fakes.fake_rows import FakeRows, Ints, PlanHistory
from quire.simulation.fakes.fake_step import (
    FakeStep,
    failed_rows,
    logprobs_of,
    pooled_rows,
    prompt_logprobs_of,
    verified,
)
from quire.simulation.fakes.fake_store import FakeStore

MAX_STEPS_IN_FLIGHT = 2


class InjectedFailureError(RuntimeError):
    """A step failed because the test asked for it."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The failures to inject, which depend only on step ids and tokens."""

    #: Ids of steps whose `execute` raises.
    execute_fails_at: frozenset[int] = frozenset()
    #: Ids of steps whose forward pass raises, in `result`.
    sample_fails_at: frozenset[int] = frozenset()
    #: The share of all other steps that fail too, drawn from `seed` and the step id.
    step_failure_rate: float = 0.0
    seed: int = 0
    #: If a row is admitted with this token, each step that computes the row fails.
    poison_token_id: int | None = None
    #: A row admitted with this token fails instead of sampling; the other rows succeed.
    nan_token_id: int | None = None

    def hits_execute(self, step_id: int) -> bool:
        return step_id in self.execute_fails_at or self._draw(2 * step_id)

    def hits_sample(self, step_id: int) -> bool:
        return step_id in self.sample_fails_at or self._draw(2 * step_id + 1)

    def _draw(self, number: int) -> bool:
        if not self.step_failure_rate:
            return False
        return mix((self.seed + number * 2 + 1) & MASK) / 2**64 < self.step_failure_rate / 2


class FakeRunner:
    """A `core.step.Runner` that computes nothing and checks every plan.

    Invariant: at most two steps are in flight.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        model: FakeModel | None = None,
        faults: Faults | None = None,
    ) -> None:
        #: A function that is called with the digest of each adapter that a plan loads.
        self.take_adapter: Callable[[str], object] = lambda digest: None
        #: The same for contents.
        self.take_content: Callable[[str], object] = lambda digest: None
        self.model = model or FakeModel()
        self.faults = faults or Faults()
        self.block_size = block_size
        self.history = PlanHistory()
        self.rows = FakeRows(
            self.history, groups, num_blocks, block_size, max_num_rows, max_num_tokens
        )
        self.store = FakeStore(self.history, len(groups), num_blocks, block_size)
        self._windows = {
            group: description.window
            for group, description in enumerate(groups)
            if description.window is not None
        }
        self._is_special = np.zeros(max_num_rows, dtype=np.bool_)
        self._steps: deque[FakeStep] = deque()
        self._last_step_id = -1
        self._has_failed = False
        self._is_sampled = True  # whether the last executed step was sampled

    # ---- the contract -----------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the rows and record the accesses of its forward pass."""
        self.history.add(plan)
        self._check_order(plan)
        # First, change the rows. Load adapters before admissions, since the fingerprints of the
        # admitted rows depend on their adapters.
        rows = self.rows
        for row in plan.release:
            rows.release(row)
        for load in plan.adapter_loads:
            self.take_adapter(load.digest)
        rows.load_adapters(plan.adapter_loads)
        for admission in plan.admit:
            rows.admit(admission)
            self._is_special[admission.row] = self._asks_for_more(admission.row)
        for fork in plan.forks:
            self._check_known(fork.source_row, f"fork into row {fork.row}")
            rows.fork(fork)
            self._is_special[fork.row] = self._asks_for_more(fork.row)
        for token_edit in plan.token_edits:
            self._check_known(token_edit.row, "token edit")
            rows.edit_tokens(token_edit)
        for edit in plan.table_edits:
            rows.edit(edit)
        for slot, digest in plan.content_loads:
            self.take_content(digest)
            rows.contents[slot] = digest
        # Then, overwrite the blocks that the plan assigns.
        self._overwrite_new(self._check_copies(plan.copies, rows.pop_new_blocks()))
        if rows.num_live != plan.num_rows:
            self.history.refuse(f"{rows.num_live} rows live, the plan says {plan.num_rows}")
        # Finally, launch the step, and inject its failure if there is one.
        step = self._launch(plan)
        self._inject_at_execute(step)
        self._steps.append(step)
        self._is_sampled = False
        if len(self._steps) == 1:
            self._resolve(step)

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Mark the last executed step as sampled."""
        if self._is_sampled:
            self.history.refuse("sample without a step that was executed and not yet sampled")
        self._is_sampled = True
        self._steps[-1].masks = {row: tuple(found) for row, found in (masks or {}).items()}

    def result(self) -> StepResult:
        """Run the forward pass of the oldest step, check what it reads, and sample."""
        if self._has_failed:
            self.history.refuse("result after a failed step without a reset")
        if len(self._steps) <= (not self._is_sampled):
            self.history.refuse("result without a sampled step in flight")
        step = self._steps.popleft()
        if self.faults.hits_sample(step.plan.step_id):
            self._fail(step, "sample")
        self.store.copy(step.plan.copies)
        self.store.write(step)
        self.store.advance_states(step)
        self.store.read_back(step)
        result = self._sample(step)
        if self._steps:
            self._resolve(self._steps[0])
        return result

    def reset(self) -> None:
        """Drop all rows and steps.

        Blocks keep their content. Only blocks that a dropped step would have written are
        overwritten, since the step may have run in part.
        """
        for step in self._steps:
            self.store.scribble_writes(step)
        self._steps.clear()
        self._is_sampled = True
        self.rows.reset()
        self._has_failed = False

    # ---- what a step will do ----------------------------------------------------------------

    def _check_order(self, plan: StepPlan) -> None:
        refuse = self.history.refuse
        if self._has_failed:
            refuse(f"step {plan.step_id} follows a failed one without a reset")
        if not self._is_sampled:
            refuse(f"step {plan.step_id} before the last one was sampled")
        if plan.step_id <= self._last_step_id:
            refuse(f"step {plan.step_id} after step {self._last_step_id}")
        if len(self._steps) >= MAX_STEPS_IN_FLIGHT:
            refuse(f"step {plan.step_id} while {len(self._steps)} are in flight")
        self._last_step_id = plan.step_id

    def _check_known(self, row: int, what: str) -> None:
        """Refuse a change that needs all tokens of a row while a step in flight will add a token to
        the row."""
        for step in self._steps:
            is_its = (step.sampling == row) & (step.epochs == self.rows.epoch[row])
            if is_its.any():
                self.history.refuse(f"{what} of row {row}, whose last token is in flight", row)

    def _check_copies(self, copies: tuple[BlockCopy, ...], new_blocks: list[int]) -> list[int]:
        """Check a plan's block copies. Returns the blocks that the plan assigns: the new blocks and
        the targets of copies."""
        if not copies:
            return new_blocks
        sources, targets = {copy.source for copy in copies}, {copy.target for copy in copies}
        refuse, table_count = self.history.refuse, self.rows.table_count
        if len(targets) < len(copies):
            refuse(f"a block is the target of two copies: {copies}")
        if targets & sources:
            refuse(f"a block is the source and the target of a copy: {copies}")
        if sources & set(new_blocks):
            refuse(f"blocks {sources & set(new_blocks)} are given out before they are copied")
        for block in targets:
            if table_count[block] > 1:
                refuse(f"block {block} is copied to, but held: {self.rows.holders(block)}")
        return [*new_blocks, *targets]

    def _launch(self, plan: StepPlan) -> FakeStep:
        """Make the step of a plan. The step computes the plan's chunks and one token of each other
        live row."""
        rows, refuse = self.rows, self.history.refuse
        is_implicit = rows.live.copy()
        is_implicit[list(rows.joining)] = False
        for chunk in plan.chunks:
            row = chunk.row
            if not (0 <= row < len(rows.live) and is_implicit[row]):
                refuse(f"{chunk} names a row that is not live, or twice", row)
            is_implicit[row] = False
        decoding = np.flatnonzero(is_implicit)
        gaps = rows.num_tokens[decoding] - rows.num_computed[decoding]
        if (gaps != 1).any():
            row = int(decoding[gaps != 1][0])
            refuse(
                f"row {row} decodes implicitly, but {rows.num_computed[row]} of its"
                f" {rows.num_tokens[row]} tokens are computed",
                row,
            )
        chunks = [chunk for chunk in plan.chunks if chunk.num_new_tokens]
        computing = np.array([*decoding, *(chunk.row for chunk in chunks)], dtype=np.int64)
        counts = np.ones(len(computing), dtype=np.int64)
        counts[len(decoding) :] = [chunk.num_new_tokens for chunk in chunks]
        if int(counts.sum()) != plan.num_tokens:
            refuse(f"{counts.sum()} tokens to compute, the plan says {plan.num_tokens}")
        if not len(computing):
            refuse("a step that computes nothing")
        # Then, add the drafts. Rows whose drafts are in flight have no known number of tokens.
        for row in computing[rows.num_drafts[computing] > 0].tolist():
            refuse(f"row {row} computes while its drafts are in flight", row)
        for chunk in chunks:
            if chunk.draft_token_ids:
                self._check_known(chunk.row, "drafts")
                rows.add_drafts(chunk)
        return self._plan_accesses(plan, computing, counts)

    def _plan_accesses(self, plan: StepPlan, computing: Ints, counts: Ints) -> FakeStep:
        """Make the step of rows that compute `counts` tokens each, and check its accesses."""
        # First, find the tokens that each row computes.
        rows, refuse = self.rows, self.history.refuse
        starts = rows.num_computed[computing]
        ends = starts + counts
        num_drafts = rows.num_drafts[computing]
        num_tokens = rows.num_tokens[computing] + num_drafts
        wrong = (ends > num_tokens) | (counts < 1)
        if wrong.any():
            row = int(computing[wrong][0])
            refuse(f"a chunk of row {row} ends beyond its {rows.num_tokens[row]} tokens", row)
        offsets = np.arange(plan.num_tokens) - np.repeat(np.cumsum(counts) - counts, counts)
        rows.check_contents(computing, starts, ends)
        # Then, find the rows that sample: rows without uncomputed tokens, and forks that join.
        closing = np.flatnonzero(ends == num_tokens)
        sources = np.array([*closing, *self._sources_of_joins(computing, closing)], dtype=np.int64)
        sampling = np.array([*computing[closing], *rows.joining], dtype=np.int64)
        step = FakeStep(
            plan=plan,
            rows=computing,
            starts=starts,
            ends=ends,
            num_drafts=num_drafts,
            write_rows=np.repeat(computing, counts),
            write_positions=np.repeat(starts, counts) + offsets,
            sampling=sampling,
            sources=sources,
            salts=rows.salts[sampling],
            epochs=rows.epoch[sampling],
            special=self._special_rows(computing, sampling, sources),
            windows=self._windows,
        )
        self._check_pooling(step)
        # Then, record the slots or pages that the step accesses in each group.
        longest = step.longest
        for group, tables in enumerate(rows.tables):
            if rows.groups[group].kind is KVKind.STATE:
                pages = np.array([tables[row] for row in computing.tolist()], dtype=np.int64)
                rows.check_unshared(np.repeat(computing, pages.shape[1]), pages.reshape(-1))
                step.pages[group] = pages
                continue
            lacking = rows.num_table_tokens[group, computing] < ends
            if lacking.any():
                row = int(computing[lacking][0])
                refuse(f"row {row} has no slot for its new tokens in group {group}", row)
            slots = rows.slots[group, step.write_rows, step.write_positions]
            self._check_writable(step, slots)
            step.write_slots[group] = slots
            step.read_slots[group] = rows.slots[group, computing, :longest]
        # Finally, advance the rows, as if all drafts were rejected.
        rows.num_computed[computing] = ends - num_drafts
        rows.num_computed[sampling] = step.num_tokens
        rows.num_ever_computed = np.maximum(rows.num_ever_computed, rows.num_computed)
        rows.num_tokens[sampling] += 1
        rows.count_joined()
        return step

    def _check_pooling(self, step: FakeStep) -> None:
        """Refuse pooling rows that don't compute all tokens that they pool, or that need one step
        but compute in several."""
        for index, sample, admission in step.special:
            pooling, row = admission.params.pooling, admission.row
            if pooling is None:
                continue
            if pooling.reads_whole_prompt and admission.num_computed_tokens:
                self.history.refuse(f"row {row} pools all tokens, but is admitted with some", row)
            if pooling.in_one_step and (step.starts[index] or sample < 0):
                self.history.refuse(f"row {row} computes its prompt in several steps", row)

    def _sources_of_joins(self, computing: Ints, closing: Ints) -> list[int]:
        """For each fork that joins the step, the index of its source row in `computing`."""
        found = {int(computing[index]): int(index) for index in closing}
        for row, source in self.rows.joining.items():
            if source not in found:
                self.history.refuse(f"row {row} joins row {source}, which closes no gap", row)
            if self.rows.num_drafts[source]:
                self.history.refuse(f"row {row} joins row {source}, which verifies drafts", row)
        return [found[source] for source in self.rows.joining.values()]

    def _check_writable(self, step: FakeStep, slots: Ints) -> None:
        if int(slots.min()) < 0:
            row = int(step.write_rows[slots < 0][0])
            self.history.refuse(f"row {row} would write into a hole", row)
        self.rows.check_unshared(step.write_rows, slots // self.block_size)

    def _resolve(self, step: FakeStep) -> None:
        """Compute the fingerprints of a step's tokens, since all of the tokens are now known."""
        step.fingerprints = self.rows.fingerprints[step.rows, : step.longest]
        step.written = self.rows.fingerprints[step.write_rows, step.write_positions]

    def _overwrite_new(self, blocks: list[int]) -> None:
        """Overwrite newly assigned blocks. Refuses blocks that a step in flight accesses."""
        if not blocks:
            return
        for step in self._steps:
            touched = np.isin(blocks, step.touched_blocks(self.block_size))
            if touched.any():
                block = blocks[int(np.argmax(touched))]
                self.history.refuse(
                    f"block {block} is given out, but step {step.plan.step_id}, which is in"
                    " flight, uses it"
                )
        self.store.scribble(blocks)

    # ---- sampling ---------------------------------------------------------------------------

    def _sample(self, step: FakeStep) -> StepResult:
        # First, sample a token for each row from the fake model, under its mask if it has one.
        assert step.fingerprints is not None
        rows = self.rows
        failed = failed_rows(step, self.faults.nan_token_id)
        last = step.last_fingerprints()
        token_ids = self.model.next_tokens(last, step.salts)
        for sample, row in enumerate(step.sampling.tolist()):
            if row in step.masks:
                draw = int(last[sample]), int(step.salts[sample])
                token_ids[sample] = self.model.next_token(*draw, step.masks[row][0])
        extras = [entry for entry in step.special if entry[1] >= 0]
        for _, sample, admission in extras:
            if admission.params.beam_width:
                token_ids[sample] = self.model.beam_candidates(int(last[sample]), 1)[0][0]
        # Then, append the tokens to the rows that still have the same sequence.
        ends = step.num_tokens
        still = (rows.epoch[step.sampling] == step.epochs) & (ends < rows.max_num_tokens)
        rows.fingerprints[step.sampling[still], ends[still]] = extend_array(
            last[still], token_ids[still]
        )
        # Rows with drafts also sample at the drafts.
        several: dict[int, list[tuple[int, int]]] = {}
        for sample in np.flatnonzero(step.num_drafts[step.sources]).tolist():
            row = int(step.sampling[sample])
            several[row] = verified(self.model, step, sample, int(token_ids[sample]))
            if still[sample]:
                rows.end_drafts(row, several[row])
        # Finally, add log-probabilities and results of pooling, and leave out failed rows.
        logprobs = {
            admission.row: entries
            for _, sample, admission in extras
            if admission.row not in failed
            and (
                entries := logprobs_of(
                    self.model,
                    admission,
                    several.get(admission.row, [(int(last[sample]), int(token_ids[sample]))]),
                )
            )
        }
        prompt_logprobs = {
            admission.row: entries
            for index, _, admission in step.special
            if (entries := prompt_logprobs_of(step, index, admission))
        }
        pooled = {row: got for row, got in pooled_rows(step).items() if row not in failed}
        sampled = [
            (row, () if row in pooled else (token_id,))
            for row, token_id in zip(step.sampling.tolist(), token_ids.tolist(), strict=True)
            if row not in failed
        ]
        tokens_of = {
            row: tuple(token_id for _, token_id in found) for row, found in several.items()
        }
        return StepResult(
            step.plan.step_id,
            [row for row, _ in sampled],
            [tokens_of.get(row, tokens) for row, tokens in sampled],
            logprobs,
            prompt_logprobs,
            failed,
            pooled,
        )

    # ---- injected failures ------------------------------------------------------------------

    def _asks_for_more(self, row: int) -> bool:
        admission, faults = self.rows.admission[row], self.faults
        assert admission is not None
        params = admission.params
        if params.logprobs is not None or params.prompt_logprobs is not None or params.beam_width:
            return True
        if params.pooling is not None:
            return True
        return any(
            token_id is not None and token_id in admission.token_ids
            for token_id in (faults.poison_token_id, faults.nan_token_id)
        )

    def _special_rows(
        self, computing: Ints, sampling: Ints, sources: Ints
    ) -> list[tuple[int, int, RowAdmission]]:
        found = [
            (int(sources[sample]), sample, self.rows.admission[sampling[sample]])
            for sample in np.flatnonzero(self._is_special[sampling]).tolist()
        ]
        others = self._is_special[computing]
        others[sources] = False
        found += [
            (index, -1, self.rows.admission[computing[index]])
            for index in np.flatnonzero(others).tolist()
        ]
        return [(*place, admission) for *place, admission in found if admission is not None]

    def _inject_at_execute(self, step: FakeStep) -> None:
        poison = self.faults.poison_token_id
        is_poisoned = any(poison in admission.token_ids for *_, admission in step.special)
        if is_poisoned or self.faults.hits_execute(step.plan.step_id):
            self._fail(step, "execute")

    def _fail(self, step: FakeStep, where: str) -> NoReturn:
        """Raise the failure of a step. Its blocks are overwritten, as if it had failed halfway."""
        self.store.scribble_writes(step)
        self._has_failed = True
        raise InjectedFailureError(f"{where} of step {step.plan.step_id} fails, as was asked")
