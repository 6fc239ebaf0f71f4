"""Applies masks, biases and penalties to logits, on a device.

`sampling.host.processors` defines the options. The processors of `SamplingRows` keep the options of
each row. This module turns the options of a set of rows into tables on the device once, and Triton
kernels apply the tables at every step. A step uploads one array, with the lengths of its rows and
the tokens that penalties have not counted yet, plus masks for rows with a grammar. The host never
waits.

Called by `sampler.py`. Legend: R rows of the step, N all rows, L tokens of a row, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.transfers import DeviceLink
from quire.kernels.triton.sampling import edit_logits, penalties
from quire.sampling.host.history import Ints
from quire.sampling.host.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    PenaltyRow,
    RowMasks,
    split_words,
)
from quire.sampling.host.sampler import Rows, SamplingRows

# Alignment of arrays that are uploaded together; Triton's wide loads need it.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors on the device, which the kernels that edit logits read."""

    #: [R] int64: the length of the sequence to which each line of the logits belongs.
    lengths: torch.Tensor
    #: [N, L] int32: the tokens of all rows.
    token_ids: torch.Tensor
    #: [n, 5] int64: the tokens that penalties have not counted yet, as `count_tokens` reads them.
    spans: torch.Tensor
    #: The number of tokens in the longest span.
    longest_span: int


Edit = Callable[[torch.Tensor, StepInputs], None]
"""A function that changes logits [R, V] in place, for the set of rows to which options were
bound."""


def upload_columns(link: DeviceLink, columns: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Upload arrays of any dtypes and shapes to the device in one copy."""
    starts, end = [], 0
    for column in columns:
        starts.append(end)
        end += -(-column.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    together = np.zeros(end, dtype=np.uint8)
    for start, column in zip(starts, columns, strict=True):
        together[start : start + column.nbytes] = (
            np.ascontiguousarray(column).view(np.uint8).ravel()
        )
    uploaded = link.upload(together)
    found = []
    for start, column in zip(starts, columns, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=column.dtype)).dtype
        part = uploaded[start : start + column.nbytes]
        found.append(part.view(dtype).view(column.shape))
    return found


def forbid_by_masks(logits: torch.Tensor, rows: Rows, masks: RowMasks, link: DeviceLink) -> None:
    """The device's version of `host.processors.apply_token_masks`."""
    lines = [line for line, row in enumerate(rows.tolist()) if row in masks]
    if not lines:
        return
    packed = [masks[int(rows[line])] for line in lines]
    edit_logits.forbid_unset(logits, link.upload(_mask_table(lines, packed, logits.shape[1])))


class DeviceCounts:
    """The tokens that penalized rows have seen, and how often they generated them.

    A row with penalties has a slot as long as its sequence is in the row. The table grows by powers
    of two and never shrinks; a slot takes 4 V bytes.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        #: [slots, V] int32; see `kernels.triton.sampling.penalties`.
        self.table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        #: The number of tokens of each slot that are counted once all queued work has run.
        self._num_counted: Rows = np.zeros(0, dtype=np.int64)
        #: The penalties and the slot of each row.
        self._of_row: dict[int, tuple[PenaltyRow, int]] = {}
        self._free: list[int] = []

    def slots(self, rows: Rows, kept: Sequence[PenaltyRow]) -> Rows:
        """The slots of `rows`, all of which use penalties. A sequence that is new in its row gets
        an empty slot."""
        return np.array(
            [self._slot(row, mine) for row, mine in zip(rows.tolist(), kept, strict=True)],
            dtype=np.int64,
        )

    def release(self, live: Callable[[int], PenaltyRow | None]) -> None:
        """Free the slots of sequences that have left. `live(row)` returns the current penalties of
        the row."""
        for row, (kept, slot) in list(self._of_row.items()):
            if live(row) is not kept:
                del self._of_row[row]
                self._free.append(slot)

    def spans(self, slots: Rows, rows: Rows, lengths: Ints, num_prompt: Rows) -> Rows:
        """The spans of uncounted tokens up to `lengths`, [n, 5] for `count_tokens`.

        From now on the tokens of these spans are assumed to be counted.
        """
        starts = self._num_counted[slots]
        # Counts can't be undone, so the tokens of a row that has become shorter are counted again
        # from zero.
        shrunk = lengths < starts
        for slot in slots[shrunk].tolist():
            self.table[slot].zero_()
        starts = np.where(shrunk, 0, starts)
        self._num_counted[slots] = lengths
        return np.stack([rows, slots, starts, lengths, num_prompt], axis=1)

    def _slot(self, row: int, kept: PenaltyRow) -> int:
        mine = self._of_row.get(row)
        if mine is not None and mine[0] is kept:
            return mine[1]
        assert mine is None, "a slot was not released"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.table[slot].zero_()
        self._num_counted[slot] = 0
        self._of_row[row] = (kept, slot)
        return slot

    def _grow(self) -> None:
        num_old, vocab_size = self.table.shape
        num_new = max(4, 2 * num_old)
        table = self.table.new_zeros((num_new, vocab_size))
        table[:num_old] = self.table
        self.table = table
        self._num_counted = np.concatenate([self._num_counted, np.zeros(num_new - num_old, int)])
        self._free.extend(range(num_new - 1, num_old - 1, -1))


class BoundPenalties:
    """The penalties of one set of rows."""

    def __init__(
        self, counts: DeviceCounts, lines: Rows, rows: Rows, kept: Sequence[PenaltyRow],
        link: DeviceLink,
    ) -> None:  # fmt: skip
        self._counts = counts
        self._lines, self._rows = lines, rows
        self._slots = counts.slots(rows, kept)
        self._num_prompt = np.array([row.num_prompt_tokens for row in kept], dtype=np.int64)
        self._places, self._factors = upload_columns(
            link,
            [
                np.stack([lines, self._slots], axis=1).astype(np.int32),
                np.array([row[:3] for row in kept], dtype=np.float32),
            ],
        )

    def spans(self, lengths: Ints) -> Rows:
        """The spans of tokens that this step must count. `lengths` [R] has the sequence length of
        each line."""
        return self._counts.spans(self._slots, self._rows, lengths[self._lines], self._num_prompt)

    def __call__(self, logits: torch.Tensor, step: StepInputs) -> None:
        table = self._counts.table
        penalties.count_tokens(table, step.spans, step.token_ids, step.longest_span)
        penalties.penalize(logits, table, self._places, self._factors)


@dataclass(frozen=True, slots=True)
class BoundEdits:
    """The logits-changing options of one set of rows, as edits of these rows' logits."""

    #: The edits in the order in which they are applied; penalties are the last.
    edits: tuple[Edit, ...]
    #: None if no row uses penalties.
    penalties: BoundPenalties | None

    def spans(self, lengths: Ints) -> Rows:
        """See `BoundPenalties.spans`."""
        if self.penalties is None:
            return np.empty((0, 5), dtype=np.int64)
        return self.penalties.spans(lengths)


def bind_edits(
    options: SamplingRows, rows: Rows, counts: DeviceCounts, link: DeviceLink
) -> BoundEdits:
    """The options of `rows` that change logits, for logits whose line i belongs to rows[i]."""
    allowed, bad_words, min_tokens, biases, penalized = options.processors
    found = [
        _bind_allowed(allowed, rows, options.vocab_size, link),
        _bind_bad_words(bad_words, rows, link),
        _bind_min_tokens(min_tokens, rows, link),
        _bind_biases(biases, rows, link),
    ]
    edits: list[Edit] = [edit for edit in found if edit is not None]
    lines, kept = penalized.users(rows)
    counts.release(penalized.kept)
    if not kept:
        return BoundEdits(tuple(edits), None)
    bound = BoundPenalties(counts, lines, rows[lines], kept, link)
    return BoundEdits((*edits, bound), bound)


def _mask_table(lines: Sequence[int], masks: Sequence[bytes], vocab_size: int) -> Ints:
    """The table of masks for `forbid_unset`. Tokens after a mask's end are forbidden."""
    width = 1 + -(-vocab_size // edit_logits.MASK_BITS)
    table = np.zeros((len(lines), width), dtype="<i4")
    table[:, 0] = lines
    packed = table.view(np.uint8)[:, 4:]
    for index, mask in enumerate(masks):
        assert len(mask) <= packed.shape[1], "a token mask is longer than the vocabulary"
        packed[index, : len(mask)] = np.frombuffer(mask, dtype=np.uint8)
    return table


def _bind_allowed(
    option: AllowedTokens, rows: Rows, vocab_size: int, link: DeviceLink
) -> Edit | None:
    lines, kept = option.users(rows)
    if not kept:
        return None
    is_allowed = np.zeros((len(kept), vocab_size), dtype=bool)
    for index, token_ids in enumerate(kept):
        is_allowed[index, list(token_ids)] = True
    packed = [line.tobytes() for line in np.packbits(is_allowed, axis=1, bitorder="little")]
    masks = link.upload(_mask_table(lines.tolist(), packed, vocab_size))
    return lambda logits, step: edit_logits.forbid_unset(logits, masks)


def _bind_bad_words(option: BadWords, rows: Rows, link: DeviceLink) -> Edit | None:
    lines, kept = option.users(rows)
    if not kept:
        return None
    num_words = [len(words) for _, words in kept]
    last, before, num_before = split_words([word for _, words in kept for word in words])
    min_length = num_before + np.repeat([num_prompt for num_prompt, _ in kept], num_words)
    table = edit_logits.Words(
        *upload_columns(
            link,
            [
                np.repeat(lines, num_words).astype(np.int32),
                np.repeat(rows[lines], num_words),
                last.astype(np.int32),
                before.astype(np.int32),
                min_length.astype(np.int32),
            ],
        )
    )
    return lambda logits, step: edit_logits.forbid_words(
        logits, table, step.lengths, step.token_ids
    )


def _bind_min_tokens(option: MinTokens, rows: Rows, link: DeviceLink) -> Edit | None:
    lines, kept = option.users(rows)
    if not kept:
        return None
    pair_lines, pair_tokens = _pairs(lines, [ends for _, ends in kept])
    limits = np.repeat([length for length, _ in kept], [len(ends) for _, ends in kept])
    line, token, limit = upload_columns(link, [pair_lines, pair_tokens, limits.astype(np.int32)])
    return lambda logits, step: edit_logits.forbid_before(logits, line, token, limit, step.lengths)


def _bind_biases(option: LogitBias, rows: Rows, link: DeviceLink) -> Edit | None:
    lines, kept = option.users(rows)
    if not kept:
        return None
    pairs = _pairs(lines, [[token for token, _ in biases] for biases in kept])
    bias = np.array([added for biases in kept for _, added in biases], dtype=np.float32)
    line, token, value = upload_columns(link, [*pairs, bias])
    return lambda logits, step: edit_logits.add_bias(logits, line, token, value)


def _pairs(lines: Rows, token_ids: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Parallel int32 arrays of lines and tokens, with each line repeated for each of its tokens."""
    pair_lines = np.repeat(lines, [len(of_line) for of_line in token_ids])
    pair_tokens = [token for of_line in token_ids for token in of_line]
    return pair_lines.astype(np.int32), np.array(pair_tokens, dtype=np.int32)
