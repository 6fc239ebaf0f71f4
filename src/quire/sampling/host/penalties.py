"""Repetition, presence and frequency penalties, and the token counts that they need.

The counts of a row follow from its tokens alone. They are kept between steps only for speed: what
was appended since the last step is added, and if a row got shorter they are counted again.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from quire.core.sampling_params import DecodingParams
from quire.sampling.host.history import Ints, TokenHistory
from quire.sampling.host.processors import BoundProcessor, LogitsProcessor, Rows

T = TypeVar("T", bound=np.generic)


class PenaltyRow(NamedTuple):
    """What one row asks for. slot: its line in `TokenCounts`."""

    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int
    slot: int


class Penalties(LogitsProcessor[PenaltyRow]):
    """Logits of tokens that were seen are lowered, in this order, each step rounded to fp32:

    repetition (prompt and output): logit / r where positive, logit * r elsewhere
        (CTRL, arXiv:1909.05858)
    frequency (output): logit - f * how often it was generated
    presence (output): logit - p if it was generated
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._counts = TokenCounts(vocab_size)

    def clear_row(self, row: int) -> None:
        """See the base class."""
        if row in self._by_row:
            self._counts.release(self._by_row[row].slot)
        super().clear_row(row)

    def _keep(self, params: DecodingParams, num_prompt_tokens: int) -> PenaltyRow | None:
        wanted = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if wanted == (1.0, 0.0, 0.0):
            return None
        return PenaltyRow(*wanted, num_prompt_tokens, self._counts.take())

    def _bind(
        self, lines: Rows, rows: Rows, kept: Sequence[PenaltyRow], device: torch.device
    ) -> BoundProcessor:
        slots = np.array([row.slot for row in kept], dtype=np.int64)
        num_prompt = np.array([row.num_prompt_tokens for row in kept], dtype=np.int64)
        factors = torch.tensor([row[:3] for row in kept], dtype=torch.float32, device=device)
        repetition, frequency, presence = factors.unsqueeze(2).unbind(1)
        line_column = torch.from_numpy(lines).to(device).unsqueeze(1)

        def apply(logits: torch.Tensor, history: TokenHistory) -> None:
            self._counts.follow(slots, rows, num_prompt, history)
            seen, counts = self._counts.seen(slots)
            tokens = torch.from_numpy(seen).to(device)
            generated = torch.from_numpy(counts).to(device)
            values = logits[line_column, tokens]
            values = torch.where(values > 0, values / repetition, values * repetition)
            values -= frequency * generated
            values -= presence * (generated > 0)
            logits[line_column, tokens] = values

        return apply


class TokenCounts:
    """Which tokens each slot has seen and how often it generated them.

    For each slot, of `num_counted` tokens: `table[token]` is 0 if it was not seen, else 1 + how
    often it was generated; `unique[:num_unique]` lists the tokens with a nonzero entry. So a step's
    work is proportional to the distinct tokens of a row, not to the vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        self._table: npt.NDArray[np.int32] = np.zeros((0, vocab_size), dtype=np.int32)
        self._unique: Rows = np.zeros((0, 64), dtype=np.int64)
        self._num_unique: Rows = np.zeros(0, dtype=np.int64)
        self._num_counted: Rows = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []
        self._num_slots = 0

    def take(self) -> int:
        """An empty slot. Its memory comes when it first counts: a device may count instead."""
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Empty a slot and give it back."""
        self._forget(slot)
        self._free.append(slot)

    def follow(self, slots: Rows, rows: Rows, num_prompt: Rows, history: TokenHistory) -> None:
        """Count what was appended to `rows`; slots, rows and num_prompt (prompt tokens): [n]."""
        self._make_slots(int(slots.max()) + 1)
        missing = history.num_tokens[rows] - self._num_counted[slots]
        for index in np.flatnonzero((missing != 0) & (missing != 1)).tolist():
            self._count_many(int(slots[index]), int(rows[index]), int(num_prompt[index]), history)
        one = missing == 1
        if one.any():
            slots, rows = slots[one], rows[one]
            position = self._num_counted[slots]
            tokens = history.token_ids[rows, position]
            self._add(slots, tokens, position >= num_prompt[one])
            self._num_counted[slots] = position + 1

    def seen(self, slots: Rows) -> tuple[Rows, npt.NDArray[np.float32]]:
        """Tokens seen [n, widest] and how often each was generated, as fp32.

        A slot that has seen fewer repeats its first token; every slot has counted at least one.
        """
        num_unique = self._num_unique[slots]
        width = int(num_unique.max())
        tokens = self._unique[slots, :width]
        tokens = np.where(np.arange(width) < num_unique[:, None], tokens, tokens[:, :1])
        return tokens, (self._table[slots[:, None], tokens] - 1).astype(np.float32)

    def _count_many(self, slot: int, row: int, num_prompt: int, history: TokenHistory) -> None:
        length = int(history.num_tokens[row])
        if length < self._num_counted[slot]:
            self._forget(slot)
        start = int(self._num_counted[slot])
        tokens = history.token_ids[row, start:length]
        num_prompt_here = max(0, num_prompt - start)
        self._add_unique(slot, np.unique(tokens[:num_prompt_here]), 0)
        self._add_unique(slot, *np.unique(tokens[num_prompt_here:], return_counts=True))
        self._num_counted[slot] = length

    def _add_unique(self, slot: int, tokens: Ints, times: Ints | int) -> None:
        new = tokens[self._table[slot, tokens] == 0]
        start = int(self._num_unique[slot])
        self._make_room(start + len(new))
        self._unique[slot, start : start + len(new)] = new
        self._num_unique[slot] = start + len(new)
        self._table[slot, new] = 1
        self._table[slot, tokens] += times

    def _add(self, slots: Rows, tokens: Ints, generated: npt.NDArray[np.bool_]) -> None:
        """One token for each of several slots, all different."""
        is_new = self._table[slots, tokens] == 0
        self._make_room(int(self._num_unique[slots].max()) + 1)
        new_slots = slots[is_new]
        self._unique[new_slots, self._num_unique[new_slots]] = tokens[is_new]
        self._num_unique[new_slots] += 1
        self._table[slots, tokens] += is_new.astype(np.int32) + generated

    def _make_slots(self, num_used: int) -> None:
        """The slots double when they run out, so that rows without penalties pay nothing."""
        num_old = len(self._num_unique)
        if num_used > num_old:
            num_new = max(4, 2 * num_old, num_used)
            self._table = _grown(self._table, 0, num_new)
            self._unique = _grown(self._unique, 0, num_new)
            self._num_unique = _grown(self._num_unique, 0, num_new)
            self._num_counted = _grown(self._num_counted, 0, num_new)

    def _forget(self, slot: int) -> None:
        if slot >= len(self._num_unique):
            return
        self._table[slot, self._unique[slot, : self._num_unique[slot]]] = 0
        self._num_unique[slot] = 0
        self._num_counted[slot] = 0

    def _make_room(self, width: int) -> None:
        if width > self._unique.shape[1]:
            self._unique = _grown(self._unique, 1, max(width, 2 * self._unique.shape[1]))


def _grown(array: npt.NDArray[T], axis: int, size: int) -> npt.NDArray[T]:
    """The array with zeros appended along `axis` up to `size`."""
    missing = list(array.shape)
    missing[axis] = size - array.shape[axis]
    return np.concatenate([array, np.zeros(missing, dtype=array.dtype)], axis=axis)
