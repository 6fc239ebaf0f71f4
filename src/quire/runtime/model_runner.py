"""Executes step plans on a model: forward pass, then sampling.

Implements `core.step.Runner`. On the CPU all work is done when `execute` and `sample` return, so
`result` never waits. On a device, `execute` and `sample` only queue work: the rows' tokens stay on
the device (`device_rows.py`), and only `result` waits. In a step with drafts `sample` waits, too,
for the tokens that decide which rows sample further.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from quire.adapters.row_adapters import RowAdapters
from quire.attention.interface import AttentionBackend
from quire.core.step import Drafts, StepPlan, StepResult, TokenLogprobs, TokenMasks
from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.transfers import current
from quire.models.interface import TextModel
from quire.observability.step_trace import StepTiming
from quire.runtime.batch import StepBatch
from quire.runtime.block_tables import Int32, Int64
from quire.runtime.contents.content_slots import StepContents
from quire.runtime.device_rows import DeviceRows
from quire.runtime.drafters import Drafter
from quire.runtime.drafts import StepDrafts
from quire.runtime.forward import NativeForward, make_forward
from quire.runtime.graphs import GraphCapture, GraphForward
from quire.runtime.kv_cache import KVCache
from quire.runtime.row_pooling import PendingPooled, RowPooling
from quire.runtime.step_timer import StepTimer
from quire.sampling.host.sampler import (
    NO_TOKEN,
    PendingLogprobs,
    PendingSample,
    SampledNow,
    SampledTokens,
    SamplingRows,
    StepSampler,
)

# Stands for the token after a draft that is not sampled yet.
NOT_SAMPLED = -2

# Prompt log-probabilities need logits of the whole vocabulary, so they are computed for at most
# this number of positions at once. If a step samples at more positions, drafts included, the logits
# after drafts are computed round by round.
PROMPT_LOGPROB_ROWS = 128


class StepRows(Protocol):
    """The runner's permanent rows: `batch.RowBatch` in main memory, or `device_rows.DeviceRows`."""

    #: Maximum number of tokens that one step computes.
    max_num_tokens: int
    #: The number of prompt tokens of each row.
    num_prompt_tokens: Int32
    #: The number of computed tokens of each row. `build` counts no drafts: the runner counts
    #: accepted drafts, unless the model has recurrent states.
    num_computed: Int64

    def change(self, plan: StepPlan) -> None:
        """Carry out release, admit, forks, token_edits and table_edits."""
        ...

    def build(self, plan: StepPlan) -> StepBatch:
        """The tensors of the step. Counts its tokens as computed."""
        ...

    def store_sampled(self, rows: Int64, sample: PendingSample) -> None:
        """Store the sampled tokens of `rows`, failed rows included, as their next inputs."""
        ...

    def prompt_token_ids(self, row: int, first: int, count: int) -> Int32:
        """`count` tokens of a row's prompt from index `first` on, in main memory."""
        ...

    def reset(self) -> None:
        """Wait for all queued work, then drop all rows."""
        ...


@dataclass(frozen=True, slots=True)
class _SampledStep:
    """The results of one step, which the device may still be computing."""

    step_id: int
    #: The rows that sample a token.
    rows: Int64
    #: None if no row samples.
    sample: PendingSample | None
    prompt_logprobs: list[tuple[int, PendingLogprobs]]
    pooled: PendingPooled
    #: The tokens after accepted drafts, round by round: the rows that sampled another token, and
    #: these tokens.
    after_drafts: Sequence[tuple[Int64, SampledTokens]] = ()

    def fetch(self) -> StepResult:
        """Wait for the results."""
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for row, entries in self.prompt_logprobs:
            prompt_logprobs.setdefault(row, []).extend(entries.fetch())
        pooled, failed = self.pooled.fetch()
        if self.sample is None:
            return StepResult(
                self.step_id,
                tuple(pooled),
                ((),) * len(pooled),
                prompt_logprobs=prompt_logprobs,
                failed=failed,
                pooled=pooled,
            )
        sampled = self.sample.fetch()
        rows, token_ids = self.rows, sampled.token_ids
        if sampled.failed:
            succeeded = token_ids != NO_TOKEN
            rows, token_ids = rows[succeeded], token_ids[succeeded]
        result = StepResult(
            self.step_id,
            [*rows.tolist(), *pooled],
            [*zip(token_ids.tolist(), strict=True), *[()] * len(pooled)],
            logprobs={row: (entry,) for row, entry in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            failed={**sampled.failed, **failed},
            pooled=pooled,
        )
        return self._with_drafts(result) if self.after_drafts else result

    def _with_drafts(self, first: StepResult) -> StepResult:
        """The result `first`, which has one token for each row, with the tokens after drafts."""
        token_ids = dict(zip(first.rows, first.token_ids, strict=True))
        logprobs = dict(first.logprobs)
        for rows, sampled in self.after_drafts:
            for row, token_id in zip(rows.tolist(), sampled.token_ids.tolist(), strict=True):
                token_ids[row] = (*token_ids[row], token_id)
            for row, entry in sampled.logprobs.items():
                logprobs[row] = (*logprobs[row], entry)
        return replace(first, token_ids=list(token_ids.values()), logprobs=logprobs)


class ModelRunner:
    """One model, its rows and its KV cache on one device.

    Any thread may call it, one at a time.
    """

    def __init__(
        self,
        model: TextModel,
        backend: AttentionBackend,
        kv_cache: KVCache,
        rows: StepRows,
        sampler: StepSampler,
        kernels: NativeKernels | None = None,
        capture: GraphCapture | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """`backend` and the model's recurrence are bound to the memory of `kv_cache` here. Its
        first layers are the model's; those of a drafter follow.

        `sampler` must read the history of `rows`. `kernels` are the native kernels that the model
        and the backend were made with; None if torch or Triton computes. `capture` captures the
        steps of a static size that `rows` builds; None means that no step is captured. `adapters`
        is None if the model's linears have no slots for adapters.
        """
        self.timing = StepTiming()
        self.model = model
        #: Called with the hidden states [T, H] of each step, which the next step overwrites.
        self.on_hidden: Callable[[torch.Tensor], None] | None = None
        #: Called in each step after its batch is built and before the forward pass.
        self.on_forward: Callable[[], None] | None = None
        #: Has the embeddings of contents; None if the model takes text only.
        self.contents: StepContents | None = None
        #: Proposes drafts; None if nothing does so on the device.
        self.drafter: Drafter | None = None
        self._changed_step_id: int | None = None  # the step whose changes `draft` made
        self._backend = backend
        self._kv_cache = kv_cache
        self._device = kv_cache.storage.device
        self._rows = rows
        self._sampler = sampler
        self._adapters = adapters
        self._timer = StepTimer() if self._device.type == "cuda" else None
        self._executed: tuple[StepPlan, StepBatch, torch.Tensor] | None = None
        self._sampled: deque[_SampledStep] = deque()
        # First, bind the backends to the cache's memory, which a recorded program refers to.
        if model.attention_specs:
            specs = model.attention_specs
            backend.bind(specs, kv_cache.layers()[: len(specs)])
        if model.recurrent_specs:
            assert model.recurrence is not None, "use_states comes before the runner"
            model.recurrence.bind(model.recurrent_specs, kv_cache.states())
        # Then choose how layers are computed, and whether decode steps are captured.
        self._forward = make_forward(model, backend, kernels, rows.max_num_tokens)
        self._pooling = RowPooling(self._forward.logits, model.scores)
        self.graphs: GraphForward | None = None
        if capture is not None:
            assert backend.serves_graphs, "steps of this attention backend can't be captured"
            assert isinstance(rows, DeviceRows), "only rows on a device build steps to capture"
            self.graphs = GraphForward(self._forward, capture, self._build_padding)
            self._forward = self.graphs

    @property
    def kv_storage(self) -> torch.Tensor:
        """The pages of all blocks, [num_blocks, bytes_per_block] uint8; see `kv_cache`."""
        return self._kv_cache.storage

    def add_drafter(self, make: Callable[[KVCache, StepRows, SamplingRows], Drafter]) -> Drafter:
        """Make a drafter of the runner's KV cache, rows and sampling options, and use it."""
        self.drafter = make(self._kv_cache, self._rows, self._sampler.rows)
        return self.drafter

    def touch_memory(self, num_bytes: int, may_go_on: Callable[[], bool]) -> None:
        """See `KVCache.touch`."""
        self._kv_cache.touch(num_bytes, may_go_on)

    @property
    def is_native(self) -> bool:
        """Whether one native program computes all layers, without torch or Triton."""
        return isinstance(self._forward, NativeForward)

    @torch.inference_mode()
    def capture_graphs(self, sizes: Iterable[int]) -> None:
        """Capture the decode steps of these static sizes now instead of at the first step of each
        size.

        Raises the device's errors.
        """
        assert self.graphs is not None, "this runner captures nothing"
        self.graphs.capture_all(sizes)

    def release_memory(self) -> None:
        """Return the memory of the KV cache and of CUDA graphs to the system.

        No step may run before `restore_memory`. Later steps must not read earlier contents.
        """
        if self.graphs is not None:
            self.graphs.drop()
        self._kv_cache.release()

    @torch.inference_mode()
    def restore_memory(self) -> None:
        """Allocate the KV cache's memory again, without content, and capture the graphs again.
        Raises InsufficientMemoryError; then all memory is released again."""
        self._kv_cache.restore()
        if self.graphs is None:
            return
        try:
            self.graphs.capture_anew()
        except torch.OutOfMemoryError as error:
            self.release_memory()
            raise InsufficientMemoryError(
                "the CUDA graphs can't be captured again; free memory of the device and call"
                f" wake_up once more: {error}"
            ) from error

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> Drafts:
        """See `core.step.Runner`. After an error, call `reset`."""
        assert self.drafter is not None, "there is no drafter"
        with current(self._device):
            self._change_rows(plan)
            self._changed_step_id = plan.step_id
            began_s = perf_counter()
            found = self.drafter.draft(plan.draft_orders)
        return Drafts(found, perf_counter() - began_s)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """See `core.step.Runner`. After an error of the forward pass, call `reset`."""
        assert self._executed is None, "the previous step was not sampled"
        started_s = perf_counter()
        with current(self._device):
            if plan.step_id != self._changed_step_id:
                self._change_rows(plan)
            self._changed_step_id = None
            step = self._rows.build(plan)
            if step.content_pieces:
                assert self.contents is not None, "there are no contents to read"
                step.input_embeds = self.contents.input_embeds(step.content_pieces)
            if self._adapters is not None:
                counts = step.num_new_tokens
                self._adapters.set_rows(step.rows, counts, len(step.token_ids))
            built_s = perf_counter()
            self._forward.plan(step)
            planned_s = perf_counter()
            if self._timer is not None:
                self._timer.begin()
            if self.on_forward is not None:
                self.on_forward()
            hidden = self._forward(step)[: plan.num_tokens]
            self._executed = (plan, step, hidden)
            if self.on_hidden is not None:
                self.on_hidden(hidden)
        self.timing.build_s = built_s - started_s
        self.timing.plan_s = planned_s - built_s
        self.timing.forward_s = perf_counter() - planned_s

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `core.step.Runner`."""
        assert self._executed is not None, "there is no executed step to sample"
        started_s = perf_counter()
        (plan, step, hidden), self._executed = self._executed, None
        with current(self._device):
            prompt_logprobs = self._prompt_logprobs(step, hidden)
            pooled, step = self._pooling.add_hidden_states(step, hidden)
            sample: PendingSample | None = None
            after_drafts: list[tuple[Int64, SampledTokens]] = []
            rows = step.sample_rows
            if len(rows):
                logits, of_drafts = self._logits(step, hidden), None
                if step.drafts is not None:
                    logits, of_drafts = logits[: len(rows)], logits[len(rows) :]
                sample = self._sampler.sample(logits, rows, _masks_at(masks, 0))
                self._rows.store_sampled(rows, sample)
                if of_drafts is not None:
                    sample = SampledNow(sample.fetch())
                    after_drafts = self._verify(step, hidden, of_drafts, sample.tokens, masks)
            if self.drafter is not None and self.drafter.needs_hidden:
                self.drafter.follow(step, hidden)
            if self._timer is not None:
                self._timer.end()
        self._sampled.append(
            _SampledStep(plan.step_id, rows, sample, prompt_logprobs, pooled, after_drafts)
        )
        self.timing.sample_s = perf_counter() - started_s

    def result(self) -> StepResult:
        """See `core.step.Runner`."""
        assert self._sampled, "there is no sampled step"
        with current(self._device):
            step = self._sampled.popleft()
            found = step.fetch()
            if self._timer is not None:
                # `fetch` does not wait for a step that samples no tokens. But a result promises
                # that the device has finished the step, so that its blocks may be reused.
                self.timing.device_s, self.timing.launching_s = self._timer.wait()
            return found

    @torch.inference_mode()
    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] fp32 of `hidden` [R, H], which are rows that `on_hidden` got.

        R is at most PROMPT_LOGPROB_ROWS. The next call may overwrite the result.
        """
        with current(self._device):
            return self._forward.logits(hidden)

    def reset(self) -> None:
        """See `core.step.Runner`. Raises the device's error if the device can't be used any
        more."""
        self._executed = self._changed_step_id = None
        self._sampled.clear()
        self._pooling.clear()
        if self._timer is not None:
            self._timer.clear()
        if self.drafter is not None:
            self.drafter.reset()
        if self.contents is not None:
            self.contents.reset()
        with current(self._device):
            self._rows.reset()

    def _logits(self, step: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of the sample rows. The logits [D, V] of all drafts follow, unless they
        are too many to be computed at once.

        A fork that joins in this step computes no token: it gets a copy of the logits of the row
        that it was forked from. The copy is needed because the sampler edits logits in place.
        """
        num_computing = len(step.sample_rows) - len(step.joined_lines)
        index, drafts = step.sample_index[:num_computing], step.drafts
        num_drafts = 0 if drafts is None else len(drafts.index)
        if num_computing == 1 and len(hidden) == 1 + num_drafts <= PROMPT_LOGPROB_ROWS:
            pass  # the tokens of one row are in this order already
        elif drafts is not None and num_computing + num_drafts <= PROMPT_LOGPROB_ROWS:
            hidden = hidden[torch.cat([index, drafts.index])]
        elif num_computing < len(hidden):  # otherwise each token is the last one of its sequence
            hidden = hidden[index]
        logits = self._forward.logits(hidden)
        if len(step.joined_lines) == 0:
            return logits
        of_rows, of_drafts = logits[:num_computing], logits[num_computing:]
        return torch.cat([of_rows, of_rows[step.joined_lines], of_drafts])

    def _verify(
        self,
        step: StepBatch,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        last: SampledTokens,
        masks: TokenMasks | None,
    ) -> list[tuple[Int64, SampledTokens]]:
        """Sample after the drafts that are right, round by round.

        `logits` are those of all drafts, or empty. `last` are the tokens of the sample rows, which
        are stored. A row stays while its last token equals its next draft. A row also leaves if
        sampling fails: the next step computes the draft's token again, and fails as it would
        without drafts. So no row fails here.
        """
        assert step.drafts is not None
        found: list[tuple[Int64, SampledTokens]] = []
        rows, first = step.sample_rows, 0
        # First, sample all positions whose tokens do not depend on earlier sampled tokens.
        known = self._sample_ahead(step.drafts, logits, rows, last)
        for place, drafts in enumerate(step.drafts.rounds, 1):
            # In each round, find the rows whose last token equals their next draft.
            last_of_row = np.full(len(self._rows.num_prompt_tokens), NO_TOKEN)
            last_of_row[rows] = last.token_ids
            held = np.flatnonzero(last_of_row[drafts.rows] == drafts.token_ids)
            if not len(held):
                break
            rows, lines = drafts.rows[held], first + held
            first += len(drafts.rows)
            # Then sample after these drafts, if that was not done before the rounds.
            last = SampledTokens(known[lines])
            unknown = np.flatnonzero(last.token_ids == NOT_SAMPLED)
            if len(unknown):
                own_lines = torch.from_numpy(lines[unknown])
                if len(logits):
                    own = logits[own_lines]
                else:
                    own = self._forward.logits(hidden[step.drafts.index[own_lines]])
                masks_here = _masks_at(masks, place)
                sampled = self._sampler.sample(own, rows[unknown], masks_here).fetch()
                last.token_ids[unknown] = sampled.token_ids
                last.logprobs.update(sampled.logprobs)
            # Last, store the tokens of the rows that did not fail.
            succeeded = last.token_ids != NO_TOKEN
            if not succeeded.all():
                rows, last = rows[succeeded], replace(last, token_ids=last.token_ids[succeeded])
            if not self.model.recurrent_specs:  # states are those before the drafts
                self._rows.num_computed[rows] += 1
            self._rows.store_sampled(rows, SampledNow(last))
            found.append((rows, last))
        return found

    def _sample_ahead(
        self, drafts: StepDrafts, logits: torch.Tensor, rows: Int64, last: SampledTokens
    ) -> Int64:
        """The tokens [D] after the drafts, if they can be sampled without the tokens before them:
        in rows that are `is_plain` and whose first draft is right. NOT_SAMPLED for other drafts.

        `logits` [D, V] are those of all drafts. If they are empty, all tokens are NOT_SAMPLED.
        """
        known = np.full(len(drafts.index), NOT_SAMPLED)
        if self._sampler.ahead is None or not len(logits):
            return known
        is_right = np.zeros(len(self._rows.num_prompt_tokens), np.bool_)
        last_of_row = np.full(len(is_right), NO_TOKEN)
        last_of_row[rows] = last.token_ids
        first = drafts.rounds[0]
        is_right[first.rows] = last_of_row[first.rows] == first.token_ids
        lines, rows, ahead = drafts.lines_of(is_right & self._sampler.rows.is_plain)
        if len(lines):
            own = logits if len(lines) == len(logits) else logits[torch.from_numpy(lines)]
            known[lines] = self._sampler.ahead.sample_ahead(own, rows, ahead)
        return known

    def _change_rows(self, plan: StepPlan) -> None:
        self._rows.change(plan)
        if plan.content_loads:
            assert self.contents is not None, f"{plan.step_id} loads contents, but there are none"
            self.contents.load(plan.content_loads)
        for row in plan.release:
            self._sampler.rows.clear_row(row)
            self._pooling.clear_row(row)
        for admission in plan.admit:
            self._sampler.rows.set_row(
                admission.row, admission.params, admission.branch_index, admission.num_prompt_tokens
            )
            self._pooling.set_row(admission.row, admission.params.pooling)
        for fork in plan.forks:
            num_prompt_tokens = int(self._rows.num_prompt_tokens[fork.row])
            self._sampler.rows.set_row(fork.row, fork.params, fork.branch_index, num_prompt_tokens)
        self._kv_cache.copy_blocks(plan.copies)
        if self._adapters is not None:
            self._adapters.change(plan)
        if self.drafter is not None:
            self.drafter.change(plan)

    def _build_padding(self, size: int) -> StepBatch:
        """A step of padding alone, to capture the graph of a static size.

        It fills the static buffers of that size, so compute it before another step is built.
        """
        assert isinstance(self._rows, DeviceRows)
        if self._adapters is not None:
            self._adapters.set_base(size)
        return self._rows.build_padding(size)

    def _prompt_logprobs(
        self, step: StepBatch, hidden: torch.Tensor
    ) -> list[tuple[int, PendingLogprobs]]:
        found: list[tuple[int, PendingLogprobs]] = []
        for row, start, count, first in step.prompt_logprob_spans:
            num_top = self._sampler.rows.num_prompt_logprobs(row)
            assert num_top is not None
            for offset in range(0, count, PROMPT_LOGPROB_ROWS):
                size = min(PROMPT_LOGPROB_ROWS, count - offset)
                logits = self._forward.logits(hidden[start + offset : start + offset + size])
                following = self._rows.prompt_token_ids(row, first + offset, size)
                entries = self._sampler.prompt_logprobs(logits, following, num_top)
                found.append((row, entries))
        return found


def _masks_at(masks: TokenMasks | None, place: int) -> Mapping[int, bytes] | None:
    """The masks of all rows at their position number `place` among the sampled ones."""
    if masks is None:
        return None
    return {row: of_row[place] for row, of_row in masks.items() if place < len(of_row)}
