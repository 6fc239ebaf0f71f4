"""The options that change logits: masks, biases and penalties.

Each option is one `LogitsProcessor`, which keeps data for each row that uses the option. `bind` is
called once for a set of rows. It returns a function that edits the logits of these rows at every
step, by index operations. The result for a row depends on that row alone: each operation is rounded
singly, and no other row is read or changed.

`sampler.py` lists the options in their order and calls them; no option depends on another. To add
an option, add a class here or in a new file, and a line in that list. Legend: R rows of the step, V
vocabulary size, W words.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from quire.core.sampling_params import DecodingParams
from quire.kernels.cpu.sampling import NativeSampling
from quire.sampling.host.history import Ints, TokenHistory

T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)
Rows = npt.NDArray[np.int64]
NEVER = float("-inf")

RowMasks = Mapping[int, bytes]
"""The token mask of each row with a grammar, in the format of `core.step.TokenMasks`."""

BoundProcessor = Callable[[torch.Tensor, TokenHistory], None]
"""A function that edits logits [R, V] in place, for the rows that were given to
`LogitsProcessor.bind`."""


class LogitsProcessor(ABC, Generic[T]):
    """One option for all rows; `T` is the type of its data for a row that uses it."""

    def __init__(self) -> None:
        self._by_row: dict[int, T] = {}

    def set_row(self, row: int, params: DecodingParams, num_prompt_tokens: int) -> None:
        """Set the data of `row` for a sequence that enters the row."""
        self.clear_row(row)
        kept = self._row_data(params, num_prompt_tokens)
        if kept is not None:
            self._by_row[row] = kept

    def clear_row(self, row: int) -> None:
        """Drop the data of the sequence in `row`, if there is one."""
        self._by_row.pop(row, None)

    def bind(self, rows: Rows, device: torch.device) -> BoundProcessor | None:
        """The option bound to logits whose line i belongs to rows[i]; None if no row uses it."""
        lines, kept = self.users(rows)
        return self._bind(lines, rows[lines], kept, device) if kept else None

    def users(self, rows: Rows) -> tuple[Rows, list[T]]:
        """The lines (indices into `rows`) whose rows use the option, and the data of each.

        As long as a sequence stays in a row, the row's data is the same object.
        """
        if not self._by_row:
            return np.empty(0, dtype=np.int64), []
        lines = [line for line, row in enumerate(rows.tolist()) if row in self._by_row]
        used = np.array(lines, dtype=np.int64)
        return used, [self._by_row[row] for row in rows[used].tolist()]

    def kept(self, row: int) -> T | None:
        """The data for the sequence in `row`; None if it does not use the option."""
        return self._by_row.get(row)

    @abstractmethod
    def _row_data(self, params: DecodingParams, num_prompt_tokens: int) -> T | None:
        """The data to keep for a sequence; None if it does not use the option."""

    @abstractmethod
    def _bind(
        self, lines: Rows, rows: Rows, kept: Sequence[T], device: torch.device
    ) -> BoundProcessor:
        """Bind to the rows that use the option, with their lines in the logits and their data."""


class AllowedTokens(LogitsProcessor[tuple[int, ...]]):
    """The option allowed_token_ids: all other tokens are impossible."""

    def _row_data(self, params: DecodingParams, num_prompt_tokens: int) -> tuple[int, ...] | None:
        return params.allowed_token_ids

    def _bind(
        self, lines: Rows, rows: Rows, kept: Sequence[tuple[int, ...]], device: torch.device
    ) -> BoundProcessor:
        all_lines = torch.from_numpy(lines).to(device)
        pair_lines, pair_tokens = _pairs(lines, kept, device)

        def apply(logits: torch.Tensor, history: TokenHistory) -> None:
            allowed = logits[pair_lines, pair_tokens]
            logits.index_fill_(0, all_lines, NEVER)
            logits[pair_lines, pair_tokens] = allowed

        return apply


class BadWords(LogitsProcessor[tuple[int, tuple[tuple[int, ...], ...]]]):
    """The option bad_words: a word's last token is impossible directly after its other tokens.

    Only generated tokens count (as in vLLM), so a word that began in the prompt may be completed. A
    word of one token is always impossible. A row's data is num_prompt_tokens and the words. Words
    with tokens beyond the model's vocabulary, which a tokenizer may have, are ignored: they can't
    be generated.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def _row_data(
        self, params: DecodingParams, num_prompt_tokens: int
    ) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        words = tuple(word for word in params.bad_words if word and max(word) < self._vocab_size)
        return (num_prompt_tokens, words) if words else None

    def _bind(
        self,
        lines: Rows,
        rows: Rows,
        kept: Sequence[tuple[int, tuple[tuple[int, ...], ...]]],
        device: torch.device,
    ) -> BoundProcessor:
        num_words = [len(words) for _, words in kept]
        word_lines, word_rows = np.repeat(lines, num_words), np.repeat(rows, num_words)
        last, prefixes, num_before = split_words([word for _, words in kept for word in words])
        min_length = num_before + np.repeat([num_prompt for num_prompt, _ in kept], num_words)
        back = np.arange(-prefixes.shape[1], 0)

        def apply(logits: torch.Tensor, history: TokenHistory) -> None:
            length = history.num_tokens[word_rows]
            columns = np.maximum(length[:, None] + back, 0)
            before = history.token_ids[word_rows[:, None], columns]
            matches = ((before == prefixes) | (prefixes == ANY_TOKEN)).all(axis=1)
            _forbid(logits, word_lines, last, matches & (length >= min_length))

        return apply


ANY_TOKEN = -1  # pads prefixes to the longest one; matches any token


def split_words(words: Sequence[tuple[int, ...]]) -> tuple[Rows, Rows, Rows]:
    """Each word's last token [W], the tokens before it [W, longest], right-aligned, and the number
    of the tokens before it [W]."""
    num_before = np.array([len(word) - 1 for word in words], dtype=np.int64)
    prefixes = np.full((len(words), int(num_before.max())), ANY_TOKEN, dtype=np.int64)
    for index, word in enumerate(words):
        if len(word) > 1:
            prefixes[index, 1 - len(word) :] = word[:-1]
    return np.array([word[-1] for word in words], dtype=np.int64), prefixes, num_before


class MinTokens(LogitsProcessor[tuple[int, tuple[int, ...]]]):
    """The option min_tokens: end and stop tokens are impossible until enough tokens are generated.

    A row's data is the sequence length (prompt included) from which these tokens are possible, and
    the tokens that are in the vocabulary. For rows with a grammar, the masks do this instead,
    because the grammar may allow only an end token.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def _row_data(
        self, params: DecodingParams, num_prompt_tokens: int
    ) -> tuple[int, tuple[int, ...]] | None:
        if params.grammar is not None:
            return None
        ends = tuple(
            token
            for token in (*params.end_token_ids, *params.stop_token_ids)
            if token < self._vocab_size
        )
        if params.min_tokens == 0 or not ends:
            return None
        return num_prompt_tokens + params.min_tokens, ends

    def _bind(
        self,
        lines: Rows,
        rows: Rows,
        kept: Sequence[tuple[int, tuple[int, ...]]],
        device: torch.device,
    ) -> BoundProcessor:
        num_ends = [len(ends) for _, ends in kept]
        pair_lines, pair_rows = np.repeat(lines, num_ends), np.repeat(rows, num_ends)
        tokens = np.array([token for _, ends in kept for token in ends], dtype=np.int64)
        min_length = np.repeat([length for length, _ in kept], num_ends)

        def apply(logits: torch.Tensor, history: TokenHistory) -> None:
            _forbid(logits, pair_lines, tokens, history.num_tokens[pair_rows] < min_length)

        return apply


class LogitBias(LogitsProcessor[tuple[tuple[int, float], ...]]):
    """The option logit_bias: adds a number to a token's logit, in fp32. An impossible token stays
    impossible."""

    def _row_data(
        self, params: DecodingParams, num_prompt_tokens: int
    ) -> tuple[tuple[int, float], ...] | None:
        return params.logit_bias or None

    def _bind(
        self,
        lines: Rows,
        rows: Rows,
        kept: Sequence[tuple[tuple[int, float], ...]],
        device: torch.device,
    ) -> BoundProcessor:
        tokens = [[token for token, _ in biases] for biases in kept]
        pair_lines, pair_tokens = _pairs(lines, tokens, device)
        bias = torch.tensor(
            [value for biases in kept for _, value in biases], dtype=torch.float32, device=device
        )

        def apply(logits: torch.Tensor, history: TokenHistory) -> None:
            logits[pair_lines, pair_tokens] = logits[pair_lines, pair_tokens] + bias

        return apply


class PenaltyRow(NamedTuple):
    """The penalties of one row."""

    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int
    #: The row's slot in `TokenCounts`.
    slot: int


class Penalties(LogitsProcessor[PenaltyRow]):
    """Lowers the logits of tokens that were seen, by three steps in order, each rounded to fp32.

        logit / r if positive, or else logit * r    repetition penalty, of prompt and output
        logit - f * times it was generated          frequency penalty, of the output
        logit - p if it was generated               presence penalty, of the output

    The repetition penalty is that of CTRL (arXiv:1909.05858).
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._counts = TokenCounts(vocab_size)

    def clear_row(self, row: int) -> None:
        """See the base class."""
        if row in self._by_row:
            self._counts.release(self._by_row[row].slot)
        super().clear_row(row)

    def _row_data(self, params: DecodingParams, num_prompt_tokens: int) -> PenaltyRow | None:
        wanted = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if wanted == (1.0, 0.0, 0.0):
            return None
        return PenaltyRow(*wanted, num_prompt_tokens, self._counts.reserve_slot())

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
    """The tokens that each slot has seen, and how often it generated them.

    A list of the distinct tokens makes a step's work proportional to their number, not to the
    vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        #: [slots, V]: 0 for a token that was not seen, else 1 + the times it was generated.
        self._table: npt.NDArray[np.int32] = np.zeros((0, vocab_size), dtype=np.int32)
        #: [slots, width]: the distinct tokens that were seen, the first _num_unique of each slot.
        self._unique: Rows = np.zeros((0, 64), dtype=np.int64)
        self._num_unique: Rows = np.zeros(0, dtype=np.int64)
        #: [slots]: the number of the row's tokens that are counted.
        self._num_counted: Rows = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []
        self._num_slots = 0

    def reserve_slot(self) -> int:
        """Reserve an empty slot. Its memory is allocated when a token is first counted here, since
        a device may count tokens instead."""
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Empty a slot, so that `reserve_slot` can return it again."""
        self._forget(slot)
        self._free.append(slot)

    def follow(self, slots: Rows, rows: Rows, num_prompt: Rows, history: TokenHistory) -> None:
        """Count the tokens appended to `rows` [n], which have `num_prompt` [n] prompt tokens."""
        self._make_slots(int(slots.max()) + 1)
        # Count rows with one uncounted token, the usual case, together, and other rows one by one.
        missing = history.num_tokens[rows] - self._num_counted[slots]
        for index in np.flatnonzero((missing != 0) & (missing != 1)).tolist():
            self._count_many(int(slots[index]), int(rows[index]), int(num_prompt[index]), history)
        lacks_one = missing == 1
        if lacks_one.any():
            slots, rows = slots[lacks_one], rows[lacks_one]
            position = self._num_counted[slots]
            tokens = history.token_ids[rows, position]
            self._add(slots, tokens, position >= num_prompt[lacks_one])
            self._num_counted[slots] = position + 1

    def seen(self, slots: Rows) -> tuple[Rows, npt.NDArray[np.float32]]:
        """The tokens seen [n, widest], and the times each was generated, as fp32.

        If a slot has seen fewer tokens, its line is filled up with its first token. Every slot must
        have counted a token.
        """
        num_unique = self._num_unique[slots]
        width = int(num_unique.max())
        tokens = self._unique[slots, :width]
        tokens = np.where(np.arange(width) < num_unique[:, None], tokens, tokens[:, :1])
        return tokens, (self._table[slots[:, None], tokens] - 1).astype(np.float32)

    def _count_many(self, slot: int, row: int, num_prompt: int, history: TokenHistory) -> None:
        length = int(history.num_tokens[row])
        if length < self._num_counted[slot]:  # the row has become shorter: count it anew
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
        """Add one token to each of several slots, which are all different."""
        is_new = self._table[slots, tokens] == 0
        self._make_room(int(self._num_unique[slots].max()) + 1)
        new_slots = slots[is_new]
        self._unique[new_slots, self._num_unique[new_slots]] = tokens[is_new]
        self._num_unique[new_slots] += 1
        self._table[slots, tokens] += is_new.astype(np.int32) + generated

    def _make_slots(self, num_used: int) -> None:
        """Allocate slots on demand, doubling them, so that rows without penalties cost nothing."""
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


def _grown(array: npt.NDArray[Number], axis: int, size: int) -> npt.NDArray[Number]:
    """The array with zeros appended along `axis` up to `size`."""
    missing = list(array.shape)
    missing[axis] = size - array.shape[axis]
    return np.concatenate([array, np.zeros(missing, dtype=array.dtype)], axis=axis)


def apply_token_masks(
    logits: torch.Tensor, rows: Rows, masks: RowMasks, native: NativeSampling | None = None
) -> None:
    """Make tokens impossible, in place, if their bit is not set; see `core.step.TokenMasks`.

    Rows of `masks` that are not among `rows` are ignored. `native` edits logits in main memory; if
    it is None, torch edits them.
    """
    vocab_size = logits.shape[1]
    lines, words = mask_words(rows, masks, vocab_size)
    if not len(lines):
        return
    if native is not None:
        native.forbid(logits, lines, words)
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    index_tensor = torch.from_numpy(lines).to(logits.device)
    logits[index_tensor] = logits[index_tensor].masked_fill_(forbidden, NEVER)


def mask_words(rows: Rows, masks: RowMasks, vocab_size: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
    """The lines [n] (indices into `rows`) that have a mask, and the masks' bits.

    The bits are words [n, ceil(vocab_size / 32)]; bits after a mask's end are 0.
    """
    wanted = rows.tolist()
    lines = [line for line, row in enumerate(wanted) if row in masks]
    width = 4 * -(-vocab_size // 32)
    found = [masks[wanted[line]] for line in lines]
    assert all(len(mask) <= width for mask in found), "a token mask is longer than the vocabulary"
    packed = b"".join(mask.ljust(width, b"\0") for mask in found)
    words = np.frombuffer(packed, dtype="<u4").reshape(len(lines), width // 4)
    return np.array(lines, dtype=np.int64), words


def _pairs(
    lines: Rows, tokens: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parallel index tensors of lines and tokens, with a line repeated for each of its tokens."""
    pair_lines = np.repeat(lines, [len(of_line) for of_line in tokens])
    pair_tokens = np.array([token for of_line in tokens for token in of_line], dtype=np.int64)
    return torch.from_numpy(pair_lines).to(device), torch.from_numpy(pair_tokens).to(device)


def _forbid(logits: torch.Tensor, lines: Rows, tokens: Rows, where: npt.NDArray[np.bool_]) -> None:
    """Make the tokens impossible in their lines, for the pairs for which `where` holds."""
    if where.any():
        logits[
            torch.from_numpy(lines[where]).to(logits.device),
            torch.from_numpy(tokens[where]).to(logits.device),
        ] = NEVER
