"""The runner's rows: token ids and block tables on the device, counts on the host.

A `RowBatch` on the host keeps the rows and computes a step's integers (positions, slots, lengths),
as it does without a device. This module copies the token ids and block tables of all rows to the
device. The host may build a step before it knows the tokens that the previous step sampled. So
sampled tokens stay on the device, and the step gathers its input tokens there. A step uploads its
integers in one copy, with the attention's plan of a captured mixed step behind them, the plan's
changes of block tables in another, and each new prompt in one more.

All work goes into the queue of one stream in order. So data that a step reads is overwritten only
after the step has run, and the host never waits. Drafts are known on the host, and uploaded.

Called by the runner.

Legend: R rows, L tokens of a row, S sequences of the step, T tokens of the step, G KV groups.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from quire.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    GroupBatch,
    MixedPlan,
    MixedSize,
    PlanVariant,
)
from quire.core.step import EditKind, StepPlan
from quire.kernels.transfers import DeviceLink
from quire.runtime.batch import NO_LINES, RowBatch, StepBatch, state_batch
from quire.runtime.block_tables import Int32, Int64
from quire.sampling.device.history import DeviceHistory
from quire.sampling.host.sampler import PendingSample

A = TypeVar("A")

# The slot of a padding token: its K and V are not written.
NO_SLOT = -1

# The parts of an upload are aligned to this number of 64-bit words. Triton recompiles a kernel for
# pointers that are not multiples of 16 bytes, and a cache line has 128 bytes.
ALIGNMENT_WORDS = 16


@dataclass(frozen=True, slots=True)
class _Numbers(Generic[A]):
    """The integers that describe a step, as numpy arrays or as tensors."""

    #: [T] int64: the index of each token's id in the flattened token ids of all rows, [R * L].
    token_index: A
    #: [T] int64.
    positions: A
    #: For each group [T] int64: the slot of each token's K and V.
    slots: tuple[A, ...]
    #: [S] int64.
    rows: A
    #: [S] int64: indices of the tokens whose hidden states give the sampled tokens' logits; unused
    #: at the end.
    sample_index: A
    #: [S + 1] int32.
    query_start: A
    #: [S] int32.
    context_lens: A


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a step's integers (`_Numbers`) in one buffer of 64-bit words."""

    num_tokens: int
    num_seqs: int
    num_groups: int

    def open(self, buffer: Any, int32: Any) -> _Numbers[Any]:
        """Views into `buffer` [num_words] int64, an array or a tensor. `int32` is the dtype of its
        library."""
        first, parts = 0, []
        for size in self._sizes():
            parts.append(buffer[first : first + size])
            first += _aligned(size)
        token_index, positions, *slots, rows, sample_index, query_start, context_lens = parts
        return _Numbers(
            token_index,
            positions,
            tuple(slots),
            rows,
            sample_index,
            query_start.view(int32)[: self.num_seqs + 1],
            context_lens.view(int32)[: self.num_seqs],
        )

    @property
    def num_words(self) -> int:
        return sum(_aligned(size) for size in self._sizes())

    def _sizes(self) -> list[int]:
        tokens, seqs = self.num_tokens, self.num_seqs
        return [tokens] * (2 + self.num_groups) + [seqs, seqs, seqs // 2 + 1, (seqs + 1) // 2]


def _aligned(num_words: int) -> int:
    return num_words + -num_words % ALIGNMENT_WORDS


@dataclass(frozen=True, slots=True)
class _Place:
    """A step's tensors on the device."""

    layout: _Layout
    buffer: torch.Tensor
    #: Views into `buffer`.
    numbers: _Numbers[torch.Tensor]
    groups: tuple[GroupBatch, ...]
    token_ids: torch.Tensor
    #: The sizes of captured mixed steps, whose plan follows the numbers in `buffer`; None for other
    #: steps.
    mixed: MixedSize | None = None

    def plan(self, variant: PlanVariant | None) -> MixedPlan | None:
        """The plan that the backend has written; None if it has written none."""
        if self.mixed is None or variant is None:
            return None
        return MixedPlan(self.mixed, variant, self.buffer[self.layout.num_words :])


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The last step, whose numbers are kept because the same rows may decode again."""

    #: The host's step, which `RowBatch` then returns again, with changed numbers.
    host_step: StepBatch
    place: _Place
    #: The uploaded words on the host, and views into them.
    words: Int64
    numbers: _Numbers[Any]
    #: [T] int64: what a row's number of tokens is added to for the index of each of its tokens in
    #: the flattened token ids.
    index_offsets: Int64
    #: The step on the device.
    step: StepBatch


class DeviceRows:
    """Rows on a device; see `model_runner.StepRows`.

    Invariant: when all queued work has run, the token ids and block tables on the device are those
    of the rows. Entries beyond the end of a row's tokens or table are undefined.
    """

    def __init__(
        self,
        host: RowBatch,
        link: DeviceLink,
        static_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        backend: AttentionBackend | None = None,
    ) -> None:
        """`host` must have no rows yet. `static_sizes` are the allowed values of
        `StepBatch.static_size` if all sequences decode, and `mixed_sizes` those of other steps,
        which `backend` plans.

        A step is not static if it has more tokens than the largest of its sizes, or if
        log-probabilities of prompt tokens are computed.
        """
        self.max_num_tokens = host.max_num_tokens
        self.num_prompt_tokens = host.num_prompt_tokens
        self.num_computed = host.num_computed
        self._host = host
        self._link = link
        self._static_sizes, self._mixed_sizes = sorted(static_sizes), sorted(mixed_sizes)
        self._backend = backend
        self._places: dict[tuple[int, bool], _Place] = {}
        self._last: _LastStep | None = None
        token_ids = torch.zeros(host.token_ids.shape, dtype=torch.int32, device=link.device)
        self._token_ids = token_ids.view(-1)
        #: The token ids on the device. The sampler reads them and appends to them.
        self.history = DeviceHistory(token_ids, host.num_tokens)
        self._tables = torch.zeros(host.tables.entries.shape, dtype=torch.int32, device=link.device)
        self._state_tables = tuple(self._tables[host.tables.num_token_groups :])

    # ---- the plan's changes -----------------------------------------------------------------

    def change(self, plan: StepPlan) -> None:
        """See `StepRows`. Follows the plan's order, so that a fork copies the tokens before they
        are edited."""
        host = self._host
        host.change(plan)
        if not (plan.admit or plan.forks or plan.token_edits or plan.table_edits):
            return
        for admission in plan.admit:
            # Copying from the host's array saves a conversion, but token edits may have changed the
            # array already.
            row, count = admission.row, len(admission.token_ids)
            given = admission.token_ids if plan.token_edits else host.token_ids[row, :count]
            target = self.history.token_ids[row, :count]
            self._link.upload_into(target, np.asarray(given, np.int32))
        for fork in plan.forks:
            # The whole row is copied; entries beyond its tokens are never read.
            self.history.token_ids[fork.row].copy_(self.history.token_ids[fork.source_row])
        length = host.token_ids.shape[1]
        edits = [
            (edit.row * length + edit.first_position, len(edit.token_ids))
            for edit in plan.token_edits
        ]
        self._write(self._token_ids, _ranges(edits), host.token_ids)
        self._write(self._tables.view(-1), self._table_places(plan), host.tables.entries)

    def _table_places(self, plan: StepPlan) -> Int64:
        """Indices into the flattened block tables of all entries that the plan has changed."""
        tables = self._host.tables
        num_groups, num_rows, length = tables.entries.shape
        spans: list[tuple[int, int]] = []
        for row in [*(new.row for new in plan.admit), *(fork.row for fork in plan.forks)]:
            for group in range(num_groups):
                count = int(tables.lengths[group, row])
                spans.append(((group * num_rows + row) * length, count))
        for edit in plan.table_edits:
            if edit.kind is not EditKind.TRUNCATE:
                first = (edit.group * num_rows + edit.row) * length + edit.first_logical_block
                spans.append((first, len(edit.block_ids)))
        return _ranges(spans)

    def _write(self, target: torch.Tensor, places: Int64, source: Int32) -> None:
        """Copy the entries at `places` of the flattened `source` to the same places of `target`."""
        count = len(places)
        if not count:
            return
        words = np.empty(_aligned(count) + (count + 1) // 2, np.int64)
        words[:count] = places
        words[_aligned(count) :].view(np.int32)[:count] = source.reshape(-1)[places]
        sent = self._link.upload(words)
        target.index_copy_(0, sent[:count], sent[_aligned(count) :].view(torch.int32)[:count])

    def store_sampled(self, rows: Int64, sample: PendingSample) -> None:
        """See `StepRows`. Only counts the tokens; the sampler has written them to `history`."""
        self._host.count_sampled(rows)

    def prompt_token_ids(self, row: int, first: int, count: int) -> Int32:
        """See `StepRows`."""
        return self._host.prompt_token_ids(row, first, count)

    def reset(self) -> None:
        """See `StepRows`. Raises the error of a computation that failed on the device."""
        self._link.synchronize()
        self._host.reset()

    # ---- the step's tensors -----------------------------------------------------------------

    def build(self, plan: StepPlan) -> StepBatch:
        """See `StepRows`."""
        step = self._host.build(plan)
        length = self._host.token_ids.shape[1]
        if step.drafts is not None:
            places = step.drafts.places(self._host.num_tokens, length)
            self._write(self._token_ids, places, self._host.token_ids)
        kept = self._last
        if kept is not None and kept.host_step is step:  # the same rows decode once more
            self._upload(kept)
            kept.step.attention.context_lens_list = step.attention.context_lens_list
            kept.step.states.context_lens_list = step.states.context_lens_list
            return kept.step
        num_tokens, num_seqs = len(step.positions), len(step.rows)
        # A captured step reads embeddings of token ids alone.
        size = 0 if step.content_pieces else self._static_size(step)
        is_mixed = num_tokens != num_seqs
        if size:
            place = self._static_place(size, is_mixed=is_mixed)
        else:
            place = self._make_place(num_tokens, num_seqs)
        words = np.zeros(len(place.buffer), np.int64)
        numbers = place.layout.open(words, np.int32)
        for slots in numbers.slots:
            slots[num_tokens:] = NO_SLOT
        numbers.rows[:num_seqs] = step.rows
        num_sampling = len(step.sample_rows) - len(step.joined_lines)
        numbers.sample_index[:num_sampling] = step.sample_index.numpy()[:num_sampling]
        _fill_query_start(numbers.query_start, step.attention.query_start.numpy())
        num_words, variant = place.layout.num_words, None
        if place.mixed is not None:
            assert self._backend is not None
            plan_words = words[num_words:]
            variant, used = self._backend.write_plan(step.attention, place.mixed, plan_words)
            num_words += used
        # A row's tokens end at its context's length. (Rotary positions may be others.)
        lengths, starts = step.num_new_tokens, step.attention.query_start.numpy()[:-1]
        offsets = np.repeat(step.rows * length - lengths - starts, lengths) + np.arange(num_tokens)
        made = self._step_batch(place, step, size, variant)
        self._last = _LastStep(step, place, words[:num_words], numbers, offsets, made)
        self._upload(self._last)
        return made

    def _upload(self, last: _LastStep) -> None:
        """Send a step's numbers. Those that change while the same rows decode are first taken from
        the host's step."""
        numbers, step, place = last.numbers, last.host_step, last.place
        count, context_lens = len(step.positions), step.attention.context_lens.numpy()
        ends = context_lens
        if count != len(ends):
            ends = np.repeat(ends, step.num_new_tokens)
        np.add(last.index_offsets, ends, out=numbers.token_index[:count])
        numbers.positions[:count] = step.positions.numpy()
        for slots, group in zip(numbers.slots, step.attention.groups, strict=True):
            slots[:count] = group.slot_mapping.numpy()
        numbers.context_lens[: len(step.rows)] = context_lens
        self._link.upload_into(place.buffer[: len(last.words)], last.words)
        if not last.step.static_size:
            self._gather(place)
            self._replace_content_ids(place, step)

    def build_padding(self, size: int) -> StepBatch:
        """A step of the static size `size` without chunks that consists only of padding."""
        self._last = None  # its buffers are overwritten
        place = self._static_place(size, is_mixed=False)
        words = np.zeros(place.layout.num_words, np.int64)
        numbers = place.layout.open(words, np.int32)
        for slots in numbers.slots:
            slots[:] = NO_SLOT
        _fill_query_start(numbers.query_start, np.zeros(1, np.int32))
        self._link.upload_into(place.buffer, words)
        none = np.zeros(0, np.int64)
        attention = _attention_batch(place, ([], [], []), 0)
        return StepBatch(
            token_ids=place.token_ids,
            positions=place.numbers.positions,
            attention=attention,
            states=state_batch(attention, self._state_tables),
            rows=none,
            num_new_tokens=none,
            sample_rows=none,
            sample_index=place.numbers.sample_index[:0],
            joined_lines=NO_LINES,
            prompt_logprob_spans=[],
            static_size=size,
            gather=partial(self._gather, place),
        )

    def _static_size(self, step: StepBatch) -> int:
        """The static size of a step, which the host has built; 0 if it is not static."""
        num_tokens, sizes = len(step.positions), self._static_sizes
        if num_tokens != len(step.rows):
            sizes = [] if step.prompt_logprob_spans else self._mixed_sizes
        index = bisect_left(sizes, num_tokens)
        return sizes[index] if index < len(sizes) else 0

    def _static_place(self, size: int, *, is_mixed: bool) -> _Place:
        if (size, is_mixed) not in self._places:
            mixed, num_seqs = None, size
            if is_mixed:
                num_seqs, max_blocks = self._host.tables.entries.shape[1:]
                mixed = MixedSize(size, num_seqs, max_blocks * self._host.tables.block_size)
            self._places[size, is_mixed] = self._make_place(size, num_seqs, mixed)
        return self._places[size, is_mixed]

    def _make_place(self, num_tokens: int, num_seqs: int, mixed: MixedSize | None = None) -> _Place:
        layout = _Layout(num_tokens, num_seqs, self._host.tables.num_token_groups)
        device, num_words = self._link.device, layout.num_words
        if mixed is not None:
            assert self._backend is not None, "mixed steps are planned by a backend"
            num_words += self._backend.num_plan_words(mixed)
        buffer = torch.empty(num_words, dtype=torch.int64, device=device)
        numbers = layout.open(buffer, torch.int32)
        tables = self._tables[: len(numbers.slots)]
        groups = tuple(map(GroupBatch, tables, numbers.slots))
        token_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
        return _Place(layout, buffer, numbers, groups, token_ids, mixed)

    def _gather(self, place: _Place) -> None:
        place.token_ids.copy_(self._token_ids.index_select(0, place.numbers.token_index))

    def _replace_content_ids(self, place: _Place, step: StepBatch) -> None:
        """Put the model's `content_token_id` where embeddings of contents are read."""
        token_id = self._host.content_token_id
        if token_id is not None and step.content_pieces:
            spans = [(first, count) for _, _, count, first in step.content_pieces]
            place.token_ids.index_fill_(0, self._link.upload(_ranges(spans)), token_id)

    def _step_batch(
        self, place: _Place, step: StepBatch, size: int, variant: PlanVariant | None
    ) -> StepBatch:
        """A copy of the host's `step` that has the tensors of `place` instead of the host's.

        `variant` is that of the plan in `place`; None if there is none.
        """
        # First, upload what only some steps have.
        host, numbers = step.attention, place.numbers
        lists = (host.query_lens_list, host.context_lens_list, host.rows_list)
        num_seqs = len(step.rows)
        num_decodes = num_seqs if len(step.positions) == num_seqs else host.num_decodes
        joined_lines = NO_LINES
        if len(step.joined_lines):
            joined_lines = self._link.upload(step.joined_lines.numpy())
        drafts = step.drafts
        if drafts is not None:
            drafts = replace(drafts, index=self._link.upload(drafts.index.numpy()))
        attention = _attention_batch(place, lists, num_decodes)
        if host.visible_ends is not None:
            attention.visible_ends = self._link.upload(host.visible_ends.numpy())
            attention.visible_ends_list = host.visible_ends_list
        attention.mixed, attention.host = place.plan(variant), host
        states = state_batch(attention, self._state_tables)
        if drafts is not None and self._state_tables:
            states.num_drafts_list = step.states.num_drafts_list
            states.num_drafts = self._link.upload(drafts.counts).to(torch.int32)
        # Then, put it beside the tensors of the place.
        return StepBatch(
            token_ids=place.token_ids,
            positions=numbers.positions,
            attention=attention,
            states=states,
            rows=step.rows,
            num_new_tokens=step.num_new_tokens,
            sample_rows=step.sample_rows,
            sample_index=numbers.sample_index[: len(step.sample_rows) - len(joined_lines)],
            joined_lines=joined_lines,
            prompt_logprob_spans=step.prompt_logprob_spans,
            static_size=size,
            gather=partial(self._gather, place) if size else None,
            content_pieces=step.content_pieces,
            drafts=drafts,
        )


def _attention_batch(
    place: _Place, lists: tuple[list[int], list[int], list[int]], num_decodes: int
) -> AttentionBatch:
    numbers = place.numbers
    query_lens, context_lens, rows = lists
    return AttentionBatch(
        query_start=numbers.query_start,
        context_lens=numbers.context_lens,
        rows=numbers.rows,
        query_lens_list=query_lens,
        context_lens_list=context_lens,
        rows_list=rows,
        num_decodes=num_decodes,
        groups=place.groups,
    )


def _fill_query_start(target: Int32, query_start: Int32) -> None:
    """Copy `query_start` to `target`, followed by padding sequences of one token each."""
    num_given = len(query_start)
    target[:num_given] = query_start
    num_missing = len(target) - num_given
    target[num_given:] = query_start[-1] + 1 + np.arange(num_missing)


def _ranges(spans: Sequence[tuple[int, int]]) -> Int64:
    """The integers of all spans (first, count), concatenated."""
    if not spans:
        return np.zeros(0, np.int64)
    firsts, counts = np.array(spans, np.int64).T
    ends = np.cumsum(counts)
    found: Int64 = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
    return found
