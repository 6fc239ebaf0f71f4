"""Turns logits into token ids by the sampling options of each row.

`SamplingRows` holds the options of each row's request. `Sampler` turns a step's logits into tokens.
Options apply in this order, which is vLLM's:

    raw log-probabilities are taken first
    grammar masks, allowed_token_ids, bad_words, min_tokens        some tokens become impossible
    logit_bias, repetition, frequency, presence penalties          logits change
    temperature 0: the largest logit, among equals the lowest token id
    else: divide by the temperature, min_p, top_k, top_p, sample   see `choice.py`

A row of a beam search is not sampled: it gets its best token, and the search chooses among the best
tokens in its log-probabilities, which are those of softmax(logits / temperature).

A step with drafts samples position after position: the model runner calls again for the rows whose
draft held, whose history then has the tokens before. Rows that are `is_plain` need no history, so
the native library samples all their positions in one call.

The sampled token of a row is a bit-exact function of its logits, options, tokens and mask alone.
The native library chooses tokens if it exists, otherwise torch (`choice.py`); the options that
change logits use torch. The model runner calls this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs
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
    RowMasks,
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
    """The sampling options of every live row, in preallocated arrays indexed by row."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        #: Increases with every change, so that data derived from a set of rows can be kept.
        self.version = 0
        #: SAMPLE_ROW records of all rows, without the position.
        self.draws = np.zeros(max_rows, dtype=SAMPLE_ROW)
        #: The number of best tokens whose log-probabilities each row wants; NO_LOGPROBS for rows
        #: that want no log-probabilities.
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        #: The divisor of a row's logits for its log-probabilities; 1 except in beam searches.
        self.logprob_temperature = np.ones(max_rows, dtype=np.float32)
        #: Row -> tokens for which its request wants log-probabilities, in place of the best tokens.
        self.logprob_token_ids: dict[int, Ints] = {}
        #: Whether a row's tokens depend on nothing but logits and position: it has no grammar, and
        #: no option that changes logits. Nor does it want log-probabilities.
        self.is_plain = np.zeros(max_rows, dtype=np.bool_)
        self._num_prompt_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        #: The options that change logits, in their order.
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
        """Set the options of a sequence that enters `row`, in place of an earlier sequence's."""
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
            self.num_logprobs[row] = 1  # the best token, from which listed tokens are computed
        divides = searches_beams and params.temperature > 0.0
        self.logprob_temperature[row] = temperature if divides else 1.0
        self._num_prompt_logprobs[row] = _or_no_logprobs(params.prompt_logprobs)
        for processor in self.processors:
            processor.set_row(row, params, num_prompt_tokens)
        changes_logits = any(processor.kept(row) is not None for processor in self.processors)
        wants_logprobs = self.num_logprobs[row] != NO_LOGPROBS
        self.is_plain[row] = not (changes_logits or wants_logprobs or params.grammar is not None)

    def clear_row(self, row: int) -> None:
        """Drop the options of the sequence that has left `row`."""
        self.version += 1
        self.logprob_token_ids.pop(row, None)
        for processor in self.processors:
            processor.clear_row(row)

    def num_prompt_logprobs(self, row: int) -> int | None:
        """The number of best tokens for each prompt position of `row`; None if it wants no
        log-probabilities."""
        count = int(self._num_prompt_logprobs[row])
        return None if count == NO_LOGPROBS else count


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled for its rows."""

    #: [R] int64, parallel to the rows; NO_TOKEN (-1) for rows that failed.
    token_ids: Rows
    #: Log-probability entries by row, for rows that want them and did not fail.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    #: Row -> message that says why no token could be sampled.
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _BoundRows:
    """The data derived from one set of rows and their options. Lines are indices into `rows`."""

    rows: Rows
    #: The options that change these rows' logits.
    processors: tuple[BoundProcessor, ...]
    #: The lines with a temperature above 0.
    sampled_lines: Rows
    #: The lines that want log-probabilities.
    logprob_lines: Rows
    #: Whether all lines only need the largest logit.
    only_argmax: bool
    #: The native library's call that chooses tokens; None if torch does.
    call: SamplingCall | None


MAX_BOUND = 16
"""Maximum number of sets of rows whose derived data is kept, such as all rows of a step, and the
rows of each round of its drafts."""


class Sampler:
    """Samples the rows of a step.

    Keeps the data derived from a few sets of rows until the options of any row change.
    """

    def __init__(self, rows: SamplingRows, native: NativeSampling | None = None) -> None:
        """`native` chooses tokens if logits are in main memory; if it is None, torch does."""
        self.rows = rows
        self._native = native
        self._bound: dict[tuple[bytes, torch.device], _BoundRows] = {}
        self._bound_version = rows.version

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int] | Rows,
        tokens: TokenHistory,
        masks: RowMasks | None = None,
    ) -> SampledTokens:
        """One token for each of `rows`, all different, at position tokens.num_tokens[row].

        `logits` [R, V] fp32 has line i for rows[i] and is overwritten. `masks` has the rows with a
        grammar. Waits for the device.
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

    def sample_ahead(
        self, logits: torch.Tensor, rows: Rows, ahead: Rows, tokens: TokenHistory
    ) -> Rows:
        """One token for each of `rows`, at position tokens.num_tokens[row] + ahead; NO_TOKEN where
        the logits are not usable.

        All rows are `is_plain`, and may be the same ones. `logits` [R, V] fp32 has line i for
        rows[i].
        """
        assert self._native is not None and self.rows.is_plain[rows].all()
        call = self._native.bind(self.rows.draws[rows])
        token_ids, largest = call.run(logits, tokens.num_tokens[rows] + ahead)
        return np.where(np.isfinite(largest), token_ids, NO_TOKEN)

    @property
    def is_native(self) -> bool:
        """Whether the native library chooses tokens."""
        return self._native is not None

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> list[TokenLogprobs]:
        """For each line of logits [C, V], the log-probability entry of the token that follows its
        position, with k best tokens."""
        native = self._native if logits.is_cpu else None
        num_top = [k] * len(next_token_ids)
        return logprobs.token_logprobs(logits, next_token_ids, num_top, native=native)

    def _bind(self, rows: Rows, device: torch.device) -> _BoundRows:
        key = (rows.tobytes(), device)
        if self._bound_version != self.rows.version:
            self._bound.clear()
            self._bound_version = self.rows.version
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) == MAX_BOUND:
                self._bound.clear()
            bound = self._bound[key] = self._derive(rows.copy(), device)
        return bound

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
        masks: RowMasks | None,
    ) -> SampledTokens:
        """Samples by the native library, after options change the logits."""
        assert self._native is not None
        # Log-probabilities need the raw logits, so they are copied first.
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
        masks: RowMasks | None,
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
        """Fill in result.logprobs.

        `raw` are unprocessed logits, whose `raw_lines` belong to bound.logprob_lines.
        """
        # First, leave out the rows that failed.
        lines = bound.logprob_lines
        succeeded = np.flatnonzero(result.token_ids[lines] != NO_TOKEN)
        if len(succeeded) == 0:
            return
        lines, raw_lines = lines[succeeded], raw_lines[succeeded]
        rows = bound.rows[lines]
        # Then divide the logits of beams by their temperature.
        temperature = self.rows.logprob_temperature[rows]
        if (temperature != 1.0).any():
            raw = _take_lines(raw, raw_lines)
            raw = raw / torch.from_numpy(temperature).to(raw.device).unsqueeze(1)
            raw_lines = np.arange(len(raw))
        # Last, compute the entries, with a request's listed tokens in place of the best tokens.
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
    masks: RowMasks | None,
    native: NativeSampling | None = None,
) -> None:
    """Apply masks and options to the logits, in place."""
    if masks:
        apply_token_masks(logits, bound.rows, masks, native)
    for processor in bound.processors:
        processor(logits, tokens)


def _take_lines(logits: torch.Tensor, lines: Rows) -> torch.Tensor:
    """A copy of some lines of the logits."""
    return logits[torch.from_numpy(lines).to(logits.device)]


def _or_no_logprobs(value: int | None) -> int:
    return NO_LOGPROBS if value is None else value


def _at(logits: torch.Tensor, columns: Rows) -> torch.Tensor:
    """The logits in one column of each line, [R]."""
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
    """The sampled tokens. Rows fail if their logits are `broken`, or if options leave no token."""
    failed: dict[int, str] = {}
    unusable = broken if empty is None else broken | empty
    if unusable.any():
        token_ids[unusable] = NO_TOKEN
        for line in np.flatnonzero(unusable).tolist():
            failed[int(rows[line])] = BROKEN_LOGITS if broken[line] else NoTokenLeftError.TEXT
    return SampledTokens(token_ids, failed=failed)


class PendingSample(Protocol):
    """The result of a `sample` call, which may not be complete yet."""

    def fetch(self) -> SampledTokens:
        """The tokens; waits for the device."""
        ...


class PendingLogprobs(Protocol):
    """The result of a `prompt_logprobs` call, which may not be complete yet."""

    def fetch(self) -> list[TokenLogprobs]:
        """One entry for each position; waits for the device."""
        ...


class AheadSampler(Protocol):
    """Samples at several positions of a row in one call."""

    def sample_ahead(self, logits: torch.Tensor, rows: Rows, ahead: Rows) -> Rows:
        """One token for each of `rows`, at position num_tokens[row] + ahead of the sampler's
        history; NO_TOKEN where the logits are not usable.

        All rows are `SamplingRows.is_plain`, and may be the same ones. `logits` [R, V] fp32 has
        line i for rows[i].
        """
        ...


class StepSampler(Protocol):
    """Samples the rows of a step from their logits."""

    #: The options of all rows, which the runner sets and clears.
    rows: SamplingRows
    #: Samples at several positions of a row; None if the sampler can't.
    ahead: AheadSampler | None

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        """One token for each of `rows`, all different, at position num_tokens[row] of the sampler's
        history.

        `logits` [R, V] fp32, on the sampler's device, has line i for rows[i] and is overwritten.
        """
        ...

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        """For each line of logits [C, V], the log-probability entry of the token that follows its
        position, with k best tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SampledNow:
    """A complete result: `fetch` doesn't wait."""

    tokens: SampledTokens

    def fetch(self) -> SampledTokens:
        return self.tokens


@dataclass(frozen=True, slots=True)
class _LogprobsNow:
    """A complete result: `fetch` doesn't wait."""

    entries: list[TokenLogprobs]

    def fetch(self) -> list[TokenLogprobs]:
        return self.entries


class HostStepSampler:
    """A `StepSampler` made of a `Sampler` and the history that it reads."""

    def __init__(self, sampler: Sampler, history: TokenHistory) -> None:
        self.rows = sampler.rows
        self.ahead: AheadSampler | None = self if sampler.is_native else None
        self._sampler = sampler
        self._history = history

    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        return SampledNow(self._sampler.sample(logits, rows, self._history, masks))

    def sample_ahead(self, logits: torch.Tensor, rows: Rows, ahead: Rows) -> Rows:
        """See `AheadSampler`."""
        return self._sampler.sample_ahead(logits, rows, ahead, self._history)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        return _LogprobsNow(self._sampler.prompt_logprobs(logits, next_token_ids, k))
