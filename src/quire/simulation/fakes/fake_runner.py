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
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from quire.core.content_spans import spans_between
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import (
    HOLE_BLOCK,
    Drafted,
    Drafts,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from quire.simulation.fakes.fake_drafter import check_order, fake_drafts
from quire.simulation.fakes.fake_model import (
    MASK,
    FakeModel,
    extend,
    extend_all,
    fake_pooled,
    mix,
)
from quire.simulation.fakes.fake_rows import FakeRows
from quire.simulation.fakes.fake_step import (
    FakeStep,
    RowStep,
    SamplingRow,
    logprobs_of,
    prompt_logprobs_of,
    sampled_tokens,
)
from quire.simulation.fakes.fake_store import FakeStore
from quire.simulation.plan_rows import RowChunk

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

    def hits_draft(self, step_id: int) -> bool:
        return self._draw(-step_id - 1)

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
        draft_error_rate: float = 0.0,
    ) -> None:
        """draft_error_rate: the share of wrong tokens among the drafts that plans order."""
        self.model = model or FakeModel()
        self.faults = faults or Faults()
        self.block_size = block_size
        self.rows = FakeRows(groups, num_blocks, block_size, max_num_rows, max_num_tokens)
        self.history = self.rows.history
        self.store = FakeStore(self.history, len(groups), num_blocks, block_size)
        # The slots of each block. HOLE_BLOCK is -1 and finds the last line, that of no block.
        lines = np.append(np.arange(num_blocks), HOLE_BLOCK)
        self._slots_of = lines[:, None] * block_size + np.arange(block_size)
        self._has_states = any(group.kind is KVKind.STATE for group in groups)
        self._steps: deque[FakeStep] = deque()
        self._last_step_id = -1
        self._has_failed = False
        self._is_sampled = True  # whether the last executed step was sampled
        self._changed_step_id: int | None = None  # the step whose changes `draft` made
        self._draft_error_rate = draft_error_rate

    # ---- the contract -----------------------------------------------------------------------

    def draft(self, plan: StepPlan) -> Drafts:
        """Apply the plan's changes to the rows, and make the drafts that it orders, some wrong."""
        self._change(plan)
        self._changed_step_id = plan.step_id
        if self.faults.hits_draft(plan.step_id):
            self._has_failed = True
            raise InjectedFailureError(f"the drafts of step {plan.step_id} fail, as was asked")
        drafted: dict[int, Drafted] = {}
        for order in plan.draft_orders:
            row = check_order(self.rows, self.rows.groups, order)
            self.rows.check_known(row, "drafts")
            for group, table in zip(self.rows.groups, row.tables, strict=True):
                if group.kind is not KVKind.STATE:
                    first = (row.num_tokens - 1) // self.block_size
                    self.rows.check_unshared(order.row, table[first:])
            fingerprint = int(self.rows.fingerprints[order.row][row.num_tokens - 1])
            drafted[order.row] = fake_drafts(
                self.model, row, fingerprint, order, self._draft_error_rate
            )
        return Drafts(drafted, 1e-4 * len(drafted))

    def execute(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the rows, if `draft` has not done so, and record the accesses
        of its forward pass."""
        if plan.step_id != self._changed_step_id:
            self._change(plan)
        elif self._has_failed:
            self.history.refuse(f"step {plan.step_id} after its drafts failed, without a reset")
        self._changed_step_id = None
        step, poison = self._launch(plan), self.faults.poison_token_id
        is_poisoned = any(poison in each.row.admission.token_ids for each in step.rows)
        if is_poisoned or self.faults.hits_execute(plan.step_id):
            self._fail(step, "execute")
        self._steps.append(step)
        self._is_sampled = False

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
        if self.faults.hits_sample(step.step_id):
            self._fail(step, "sample")
        self.store.copy(step.copies)
        self.store.write(step)
        self.store.advance_states(step)
        self.store.read_back(step)
        return self._sample(step)

    def reset(self) -> None:
        """Drop all rows and steps.

        Blocks keep their content. Only blocks that a dropped step would have written are
        overwritten, since the step may have run in part.
        """
        for step in self._steps:
            self.store.scribble_writes(step)
        self._steps.clear()
        self._is_sampled = True
        self._changed_step_id = None
        self.rows.reset()
        self._has_failed = False

    # ---- what a step will do ----------------------------------------------------------------

    def _change(self, plan: StepPlan) -> None:
        self._check_order(plan)
        self.rows.change(plan)
        self._overwrite(self.rows.assigned_blocks)

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

    def _launch(self, plan: StepPlan) -> FakeStep:
        """Make the step of a plan, and check its accesses."""
        # First, find the rows that compute, and their work.
        rows = self.rows
        computed = rows.compute(plan)
        decodes = sorted(computed.decodes, key=lambda row: row.number)
        found = [RowChunk(row, row.num_computed - 1, row.num_computed) for row in decodes]
        found += computed.chunks.values()
        step, sampling = FakeStep(plan.step_id, rows.copies), set(computed.sampling)
        for row, start, end, drafts in found:
            each = RowStep(row, start, end, drafts, rows.fingerprints[row.number])
            step.rows.append(each)
            if drafts:
                self._write_drafts(each)
            self._check_prompt(each, is_sampled=row in sampling)
            self._add_accesses(each, step)
        step.touched_blocks.update(block for copy in rows.copies for block in copy)
        # Then, find the rows that sample, from logits of their own or of their sources.
        sources = {each.row.number: each for each in step.rows}
        step.sampling = [
            SamplingRow(each.row, each, each.fingerprints)
            for each in step.rows
            if each.row in sampling
        ]
        step.sampling += [
            SamplingRow(rows.live[number], sources[source_number], rows.fingerprints[number])
            for number, source_number in rows.joining.items()
        ]
        return step

    def _check_prompt(self, step: RowStep, *, is_sampled: bool) -> None:
        """Refuse a row that computes positions of a content which is in no slot, and a pooling row
        that doesn't compute all tokens that it pools. Refuse both if the row takes several steps,
        but must take one."""
        row, admission, refuse = step.row.number, step.row.admission, self.history.refuse
        for span in spans_between(admission.content_spans, step.start, step.end):
            if span.digest not in self.rows.contents.values():
                refuse(f"row {row} reads {span}, which no slot has", row)
            if span.in_one_step and not step.start <= span.first_position < span.end <= step.end:
                refuse(f"row {row} computes {span} in several steps", row)
        pooling = admission.params.pooling
        if pooling is None:
            return
        if pooling.reads_whole_prompt and admission.num_computed_tokens:
            refuse(f"row {row} pools all tokens, but is admitted with some", row)
        if pooling.in_one_step and (step.start or not is_sampled):
            refuse(f"row {row} computes its prompt in several steps", row)

    def _write_drafts(self, step: RowStep) -> None:
        """Write the fingerprints of drafts after a row's tokens, which must have been known before
        this step."""
        row, refuse = step.row.number, self.history.refuse
        if step.row.num_unknown > 1:
            refuse(f"drafts of row {row}, whose last token is in flight", row)
        if step.end >= self.rows.max_num_tokens:
            refuse(f"drafts leave no room for a token: row {row} has {step.num_tokens}", row)
        extend_all(step.fingerprints, step.num_tokens, step.drafts)

    def _add_accesses(self, each: RowStep, step: FakeStep) -> None:
        """Add the slots and pages that a row reads and writes in each group, and check them."""
        size, row, refuse = self.block_size, each.row.number, self.history.refuse
        for group, table in enumerate(each.row.tables):
            if self.rows.groups[group].kind is KVKind.STATE:
                self.rows.check_unshared(row, table)
                each.pages[group] = np.array(table, dtype=np.int64)
                step.touched_blocks.update(table)
                continue
            if len(table) * size < each.end:
                refuse(f"row {row} has no slot for its new tokens in group {group}", row)
            end_block = -(-each.end // size)
            written = table[each.start // size : end_block]
            if HOLE_BLOCK in written:
                refuse(f"row {row} would write into a hole", row)
            self.rows.check_unshared(row, written)
            # The first query of a window sees the keys from start - window + 1 on.
            window = self.rows.groups[group].window
            first = 0 if window is None else max(0, each.start - window + 1)
            blocks = table[first // size : end_block]
            step.touched_blocks.update(blocks)
            slots = self._slots_of[blocks].reshape(-1)
            offset = first % size
            each.slots[group] = slots[offset : offset + each.end - first]

    def _overwrite(self, blocks: list[int]) -> None:
        """Overwrite blocks that a plan assigns. Refuses blocks that a step in flight accesses."""
        if not blocks:
            return
        for step in self._steps:
            for block in blocks:
                if block in step.touched_blocks:
                    self.history.refuse(
                        f"block {block} is given out, but step {step.step_id}, which is in"
                        " flight, uses it"
                    )
        self.store.scribble(blocks)

    # ---- sampling ---------------------------------------------------------------------------

    def _sample(self, step: FakeStep) -> StepResult:
        """Sample the rows of a step, and add their tokens to their fingerprints."""
        rows: list[int] = []
        token_ids: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        pooled: dict[int, bytes] = {}
        for sampler in step.sampling:
            # First, sample. A failed row gets a token, too, since a step in flight may compute it.
            row, admission = sampler.row.number, sampler.row.admission
            sampled = sampled_tokens(self.model, sampler, step.masks.get(row))
            place = sampler.source.num_tokens + len(sampled) - 1
            sampler.fingerprints[place] = extend(*sampled[-1])
            num_accepted = len(sampled) - 1
            self.rows.land(sampler.row, num_accepted, are_computed=not self._has_states)
            if self.faults.nan_token_id in admission.token_ids:
                failed[row] = f"NaN in the logits of row {row}"
                continue
            # Then, add what the request asks for.
            rows.append(row)
            if admission.params.pooling is not None:
                pooled[row] = fake_pooled(sampled[0][0])
                token_ids.append(())
                continue
            token_ids.append(tuple(token_id for _, token_id in sampled))
            if entries := logprobs_of(self.model, admission, sampled):
                logprobs[row] = entries
        prompt_logprobs = {
            each.row.number: entries for each in step.rows if (entries := prompt_logprobs_of(each))
        }
        return StepResult(step.step_id, rows, token_ids, logprobs, prompt_logprobs, failed, pooled)

    # ---- injected failures ------------------------------------------------------------------

    def _fail(self, step: FakeStep, where: str) -> NoReturn:
        """Raise the failure of a step. Its blocks are overwritten, as if it had failed halfway."""
        self.store.scribble_writes(step)
        self._has_failed = True
        raise InjectedFailureError(f"{where} of step {step.step_id} fails, as was asked")
