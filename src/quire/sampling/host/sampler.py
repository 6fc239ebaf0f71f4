"""Turns logits into token ids; every row may have other options.

`SamplingRows` holds the options of each row's request; `Sampler` turns a step's logits into tokens.
Options apply in this order, which is vLLM's:

    raw log-probabilities are taken first
    grammar masks, allowed_token_ids, bad_words, min_tokens        some tokens become impossible
    logit_bias, repetition, frequency, presence penalties          logits change
    temperature 0: the largest logit, of equal ones the lowest token id
    else: divide by the temperature, min_p, top_k, top_p, sample   see `choice.py`

A row that searches beams samples nothing: it gets its best token, and as the best tokens of its
log-probabilities, here of softmax(logits / temperature), the candidates that the search chooses
from.

What is sampled for a row is a function of its logits, options, tokens and mask alone, to the bit.
Tokens are chosen by the native library where there is one, else by torch (`choice.py`); all that
changes logits is torch. The model runner calls this; it knows no requests, no text and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs, TokenMasks
from quire.errors import NoTokenLeftError
from quire.kernels.cpu.sampling import SAMPLE_ROW, NativeSampling, SamplingCall
from quire.sampling.host import choice, logprobs, noise
from quire.sampling.host.history import Ints, TokenHistory
from quire.sampling.host.processors import (
    AllowedTokens,
    BadWords,
    BoundProcessor,
    LogitBias,
    MinTokens,
    Penalties,
    apply_token_masks,
    mask_words,
)

Rows = npt.NDArray[np.int64]

NO_TOKEN = -1
NO_LOGPROBS = -1

BROKEN_LOGITS = (
    "the model computed no usable logits for this sequence (NaN or infinity); its weights or its "
    "number format may be damaged, or overflow with this prompt"
)


class SamplingRows:
    """The sampling options of every live row, in preallocated arrays indexed by row.

    `version` changes with every change, so that what was derived from a set of rows can be kept.
    `draws` are SAMPLE_ROW records, but for the position: how each row is sampled.
    `logprob_token_ids` has the rows that list tokens in place of the best ones.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.version = 0
        self.draws = np.zeros(max_rows, dtype=SAMPLE_ROW)
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self.logprob_temperature = np.ones(max_rows, dtype=np.float32)
        self.logprob_token_ids: dict[int, Ints] = {}
        self._num_prompt_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self.processors = (
            AllowedTokens(),
            BadWords(vocab_size),
            MinTokens(vocab_size),
            LogitBias(),
            Penalties(vocab_size),
        )

    def set_row(
        self, row: int, params: DecodingParams, branch_index: int, num_prompt_tokens: int
    ) -> None:
        """A sequence enters `row`, which need not have been cleared."""
        self.version += 1
        searches_beams = params.beam_width > 0
        temperature = max(params.temperature, choice.MIN_TEMPERATURE)
        draw = self.draws[row]
        draw["stream"] = noise.stream(params.seed, branch_index)
        is_greedy = params.temperature == 0.0 or searches_beams
        draw["temperature"] = 0.0 if is_greedy else temperature
        draw["log_min_p"] = np.log(params.min_p) if params.min_p > 0.0 else choice.NEVER
        draw["top_k"] = params.top_k if params.top_k < self.vocab_size else 0
        draw["top_p"] = params.top_p
        count = params.num_beam_candidates if searches_beams else params.logprobs
        self.num_logprobs[row] = _or_no_logprobs(count)
        self.logprob_token_ids.pop(row, None)
        if params.logprob_token_ids:
            self.logprob_token_ids[row] = np.array(params.logprob_token_ids, dtype=np.int64)
            self.num_logprobs[row] = 1  # the best one, to which the others are related
        divides = searches_beams and params.temperature > 0.0
        self.logprob_temperature[row] = temperature if divides else 1.0
        self._num_prompt_logprobs[row] = _or_no_logprobs(params.prompt_logprobs)
        for processor in self.processors:
            processor.set_row(row, params, num_prompt_tokens)

    def clear_row(self, row: int) -> None:
        """The sequence in `row` has left."""
        self.version += 1
        self.logprob_token_ids.pop(row, None)
        for processor in self.processors:
            processor.clear_row(row)

    def num_prompt_logprobs(self, row: int) -> int | None:
        """Number of best tokens for each prompt position of `row`; None: no log-probabilities."""
        count = int(self._num_prompt_logprobs[row])
        return None if count == NO_LOGPROBS else count


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled for its rows.

    token_ids: [R] int64, parallel to the rows; NO_TOKEN (-1) for those that failed.
    logprobs: row -> entry, for the rows that want log-probabilities and did not fail.
    failed: row -> a sentence that says why nothing could be sampled for it.
    """

    token_ids: Rows
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _BoundRows:
    """What is derived from one set of rows and their options. Lines are indices into `rows`.

    call: chooses their tokens, where the native library does.
    """

    rows: Rows
    processors: tuple[BoundProcessor, ...]
    sampled_lines: Rows
    logprob_lines: Rows
    only_argmax: bool
    call: SamplingCall | None


class Sampler:
    """Samples the rows of a step; keeps what it derives from a set of rows while that lasts."""

    def __init__(self, rows: SamplingRows, native: NativeSampling | None = None) -> None:
        """native: chooses tokens in logits that lie in main memory; None: torch does everywhere."""
        self.rows = rows
        self._native = native
        self._bound: tuple[tuple[int, bytes, torch.device], _BoundRows] | None = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int] | Rows,
        tokens: TokenHistory,
        masks: TokenMasks | None = None,
    ) -> SampledTokens:
        """One token for each of `rows`, all different, at position tokens.num_tokens[row].

        logits: [R, V] fp32, line i for rows[i]; overwritten. masks: the rows with a grammar.
        Waits for the device.
        """
        bound = self._bind(np.asarray(rows, dtype=np.int64), logits.device)
        if len(bound.rows) == 0:
            return SampledTokens(bound.rows)
        if bound.call is None:
            return self._sample_torch(logits, bound, tokens, masks)
        if bound.processors or masks:
            return self._sample_edited(bound.call, logits, bound, tokens, masks)
        token_ids, largest = bound.call.run(logits, self._positions(bound, tokens))
        is_finite = np.isfinite(largest)
        if is_finite.all() and len(bound.logprob_lines) == 0:
            return SampledTokens(token_ids)
        result = sampled_tokens(bound.rows, token_ids, ~is_finite)
        self._add_logprobs(result, logits, bound.logprob_lines, bound)
        return result

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> list[TokenLogprobs]:
        """Entries for the tokens that follow the positions of logits [C, V], with k best tokens."""
        native = self._native if logits.is_cpu else None
        num_top = [k] * len(next_token_ids)
        return logprobs.token_logprobs(logits, next_token_ids, num_top, native=native)

    def _bind(self, rows: Rows, device: torch.device) -> _BoundRows:
        key = (self.rows.version, rows.tobytes(), device)
        if self._bound is None or self._bound[0] != key:
            self._bound = (key, self._derive(rows.copy(), device))
        return self._bound[1]

    def _derive(self, rows: Rows, device: torch.device) -> _BoundRows:
        bound = (processor.bind(rows, device) for processor in self.rows.processors)
        processors = tuple(processor for processor in bound if processor is not None)
        draws = self.rows.draws[rows]
        sampled_lines = np.flatnonzero(draws["temperature"])
        logprob_lines = np.flatnonzero(self.rows.num_logprobs[rows] != NO_LOGPROBS)
        only_argmax = not processors and len(sampled_lines) == 0 and len(logprob_lines) == 0
        is_native = self._native is not None and device.type == "cpu"
        call = self._native.bind(draws) if self._native is not None and is_native else None
        return _BoundRows(rows, processors, sampled_lines, logprob_lines, only_argmax, call)

    @staticmethod
    def _positions(bound: _BoundRows, tokens: TokenHistory) -> Ints | None:
        return tokens.num_tokens[bound.rows] if len(bound.sampled_lines) else None

    @torch.inference_mode()
    def _sample_edited(
        self,
        call: SamplingCall,
        logits: torch.Tensor,
        bound: _BoundRows,
        tokens: TokenHistory,
        masks: TokenMasks | None,
    ) -> SampledTokens:
        """By the native library, where options change logits before."""
        assert self._native is not None
        has_logprobs = len(bound.logprob_lines) > 0
        raw = _take_lines(logits, bound.logprob_lines) if has_logprobs else None
        positions = self._positions(bound, tokens)
        if masks and not bound.processors:
            lines, words = mask_words(bound.rows, masks, logits.shape[1])
            token_ids, largest, before = call.run_allowed(logits, positions, lines, words)
        else:
            before = self._native.largest(logits)
            _edit(logits, bound, tokens, masks, self._native)
            token_ids, largest = call.run(logits, positions)
        broken = ~np.isfinite(before)
        result = sampled_tokens(bound.rows, token_ids, broken, ~np.isfinite(largest))
        if raw is not None:
            self._add_logprobs(result, raw, np.arange(len(raw)), bound)
        return result

    @torch.inference_mode()
    def _sample_torch(
        self,
        logits: torch.Tensor,
        bound: _BoundRows,
        tokens: TokenHistory,
        masks: TokenMasks | None,
    ) -> SampledTokens:
        if bound.only_argmax and not masks:
            best = choice.first_argmax(logits)
            return sampled_tokens(bound.rows, best, ~_is_finite(_at(logits, best)))
        broken = ~_is_finite(logits.amax(dim=1))
        raw = _take_lines(logits, bound.logprob_lines)
        _edit(logits, bound, tokens, masks)
        best = choice.first_argmax(logits)
        largest = _at(logits, best)
        empty = ~_is_finite(largest)
        lines = bound.sampled_lines[~(broken | empty)[bound.sampled_lines]]
        if len(lines):
            best[lines] = self._draw(logits, largest, lines, bound.rows[lines], tokens)
        result = sampled_tokens(bound.rows, best, broken, empty)
        self._add_logprobs(result, raw, np.arange(len(raw)), bound)
        return result

    def _draw(
        self,
        logits: torch.Tensor,
        largest: torch.Tensor,
        lines: Rows,
        rows: Rows,
        tokens: TokenHistory,
    ) -> Rows:
        """Tokens for some lines of the processed logits, which belong to `rows`."""
        state = self.rows.draws[rows]
        draw = choice.Draw(
            keys=noise.row_keys(state["stream"], tokens.num_tokens[rows]),
            temperature=state["temperature"],
            log_min_p=state["log_min_p"],
            top_k=state["top_k"],
            top_p=state["top_p"],
        )
        if len(lines) == len(logits):
            return choice.sample(logits, largest, draw)
        index = torch.from_numpy(lines).to(logits.device)
        return choice.sample(logits[index], largest[index], draw)

    def _add_logprobs(
        self, result: SampledTokens, raw: torch.Tensor, raw_lines: Rows, bound: _BoundRows
    ) -> None:
        """Fill in result.logprobs. raw: unprocessed logits, those of bound.logprob_lines in its
        lines raw_lines."""
        lines = bound.logprob_lines
        succeeded = np.flatnonzero(result.token_ids[lines] != NO_TOKEN)
        if len(succeeded) == 0:
            return
        lines, raw_lines = lines[succeeded], raw_lines[succeeded]
        rows = bound.rows[lines]
        temperature = self.rows.logprob_temperature[rows]
        if (temperature != 1.0).any():
            raw = _take_lines(raw, raw_lines)
            raw = raw / torch.from_numpy(temperature).to(raw.device).unsqueeze(1)
            raw_lines = np.arange(len(raw))
        entries = logprobs.token_logprobs(
            raw,
            result.token_ids[lines],
            self.rows.num_logprobs[rows].tolist(),
            lines=raw_lines,
            native=None if bound.call is None else self._native,
        )
        listed = self.rows.logprob_token_ids
        for at, row in enumerate(rows.tolist() if listed else ()):
            if row in listed:
                entries[at] = logprobs.of_listed(entries[at], raw[raw_lines[at]], listed[row])
        result.logprobs.update(zip(rows.tolist(), entries, strict=True))


def _edit(
    logits: torch.Tensor,
    bound: _BoundRows,
    tokens: TokenHistory,
    masks: TokenMasks | None,
    native: NativeSampling | None = None,
) -> None:
    """Apply, in place, what changes logits."""
    if masks:
        apply_token_masks(logits, bound.rows, masks, native)
    for processor in bound.processors:
        processor(logits, tokens)


def _take_lines(logits: torch.Tensor, lines: Rows) -> torch.Tensor:
    """A copy of some lines."""
    return logits[torch.from_numpy(lines).to(logits.device)]


def _or_no_logprobs(value: int | None) -> int:
    return NO_LOGPROBS if value is None else value


def _at(logits: torch.Tensor, columns: Rows) -> torch.Tensor:
    """One value of each line, [R]."""
    index = torch.from_numpy(columns).to(logits.device).unsqueeze(1)
    return logits.gather(1, index).squeeze(1)


def _is_finite(values: torch.Tensor) -> npt.NDArray[np.bool_]:
    finite: npt.NDArray[np.bool_] = np.isfinite(values.cpu().numpy())
    return finite


def sampled_tokens(
    rows: Rows,
    token_ids: Rows,
    broken: npt.NDArray[np.bool_],
    empty: npt.NDArray[np.bool_] | None = None,
) -> SampledTokens:
    """The sampled tokens; rows with `broken` logits, or with none left by the options, failed."""
    failed: dict[int, str] = {}
    unusable = broken if empty is None else broken | empty
    if unusable.any():
        token_ids[unusable] = NO_TOKEN
        for line in np.flatnonzero(unusable).tolist():
            failed[int(rows[line])] = BROKEN_LOGITS if broken[line] else NoTokenLeftError.TEXT
    return SampledTokens(token_ids, failed=failed)


class PendingSample(Protocol):
    """What one `sample` call will have found."""

    def fetch(self) -> SampledTokens:
        """The tokens; waits for the device."""
        ...


class PendingLogprobs(Protocol):
    """What one `prompt_logprobs` call will have found."""

    def fetch(self) -> list[TokenLogprobs]:
        """One entry for each position; waits for the device."""
        ...


class StepSampler(Protocol):
    """Samples the rows of a step from their logits.

    rows: the options of all rows, which the runner sets and clears.
    """

    rows: SamplingRows

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: TokenMasks | None = None
    ) -> PendingSample:
        """One token for each of `rows`, all different, at position num_tokens[row] of the history
        that the sampler was made with.

        logits: [R, V] fp32 on the sampler's device, line i for rows[i]; overwritten.
        """
        ...

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        """Entries for the tokens that follow the positions of logits [C, V], with k best tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _SampledNow:
    """Already complete: `fetch` doesn't wait."""

    tokens: SampledTokens

    def fetch(self) -> SampledTokens:
        return self.tokens


@dataclass(frozen=True, slots=True)
class _LogprobsNow:
    """Already complete: `fetch` doesn't wait."""

    entries: list[TokenLogprobs]

    def fetch(self) -> list[TokenLogprobs]:
        return self.entries


class HostStepSampler:
    """A `Sampler` with the history that it reads. See `StepSampler`."""

    def __init__(self, sampler: Sampler, history: TokenHistory) -> None:
        self.rows = sampler.rows
        self._sampler = sampler
        self._history = history

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: TokenMasks | None = None
    ) -> PendingSample:
        return _SampledNow(self._sampler.sample(logits, rows, self._history, masks))

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        return _LogprobsNow(self._sampler.prompt_logprobs(logits, next_token_ids, k))
