"""Samples tokens on a device without waiting; the tokens equal the host sampler's.

`sample` launches a few kernels. Data that is derived from a set of rows and their options stays on
the device until the rows or options change. So a step with the same rows uploads only one small
array, the lengths of the sequences, and masks for rows with a grammar. `sample` starts one copy of
all results to the host, and `fetch` waits for it. The tokens are also written to the history on the
device, where the next step reads them.

    logits -> scan -> edits, scan again -> race, choose, weigh, finish -> tokens
                 \\-> a copy of the lines that need log-probabilities -> entries

Order and meaning of the options are those of `host/sampler.py`. The kernels are in
`kernels/triton`. The model runner calls this module. Legend: R rows of the step, V vocabulary size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs
from quire.kernels.transfers import DeviceLink, Download
from quire.kernels.triton.sampling import gumbel_sample, token_logprobs
from quire.kernels.triton.sampling.gumbel_sample import (
    BROKEN,
    EMPTY,
    SAMPLED,
    Draws,
    Outcome,
    Workspace,
)
from quire.kernels.triton.sampling.scan_logits import Scan, scan_logits
from quire.kernels.triton.sampling.token_logprobs import LogprobQueries
from quire.sampling.device.history import DeviceHistory
from quire.sampling.device.processors import (
    BoundEdits,
    DeviceCounts,
    StepInputs,
    bind_edits,
    forbid_by_masks,
    upload_columns,
)
from quire.sampling.host.history import Ints
from quire.sampling.host.logprobs import related
from quire.sampling.host.processors import RowMasks
from quire.sampling.host.sampler import (
    NO_LOGPROBS,
    AheadSampler,
    PendingLogprobs,
    PendingSample,
    Rows,
    SampledTokens,
    SamplingRows,
    sampled_tokens,
)

Int32s = npt.NDArray[np.int32]


class DeviceSampler:
    """See `host.sampler.StepSampler`. Keeps the data derived from a set of rows until it changes.

    Every call uses the current stream of the device, which must be the same each time.
    """

    def __init__(self, rows: SamplingRows, history: DeviceHistory, link: DeviceLink) -> None:
        self.rows = rows
        self.ahead: AheadSampler | None = None
        self._history = history
        self._link = link
        self._counts = DeviceCounts(rows.vocab_size, link.device)
        self._bound: tuple[tuple[int, bytes], _BoundDeviceRows] | None = None

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Rows, masks: RowMasks | None = None
    ) -> PendingSample:
        """See `StepSampler.sample`. Does not wait for the device."""
        if len(rows) == 0:
            return _Nothing()
        # First, get the data of these rows, upload the step's inputs, and divide the output buffer.
        bound = self._bind(np.asarray(rows, dtype=np.int64))
        step = self._upload(bound)
        are_edited = bool(bound.edits.edits or masks)
        out = torch.empty(bound.parts[-1].stop, dtype=torch.int32, device=logits.device)
        token, state, entries, differences = (out[part] for part in bound.parts)
        # Second, scan the raw logits, and copy those that log-probabilities need.
        scan = bound.raw_scan
        scan_logits(logits, scan)
        source = None
        if bound.logprobs is not None:
            source = bound.logprobs.source(logits, scan, are_edited=are_edited)
        # Third, edit the logits and sample.
        if are_edited:
            scan = self._edit(logits, bound, step, masks)
        outcome = Outcome(token, state, step.token_ids, bound.row, step.lengths)
        gumbel_sample.gumbel_sample(
            logits, scan, bound.raw_scan, bound.draws, bound.workspace, outcome
        )
        # Last, compute log-probabilities, and start the download of all results.
        if source is not None:
            found = entries.view(bound.shape_of_entries)
            token_logprobs.token_logprobs(*source, token, found)
            if bound.listed is not None:
                differences.copy_(bound.listed.differences(*source).view(torch.int32))
        return _Pending(bound, self._link.download(out))

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Ints, k: int
    ) -> PendingLogprobs:
        """See `StepSampler.prompt_logprobs`. Does not wait for the device."""
        num_lines, vocab_size = logits.shape
        num_top = np.full(num_lines, min(k, vocab_size), dtype=np.int32)
        lines = np.arange(num_lines, dtype=np.int32)
        line, top, token_ids = upload_columns(
            self._link, [lines, num_top, next_token_ids.astype(np.int32)]
        )
        scan = Scan.empty(logits.shape, logits.device)
        out = torch.empty((num_lines, _width(num_top)), dtype=torch.int32, device=logits.device)
        scan_logits(logits, scan)
        token_logprobs.token_logprobs(logits, scan, LogprobQueries(line, line, top), token_ids, out)
        return _PendingEntries(next_token_ids.copy(), num_top, self._link.download(out))

    def _bind(self, rows: Rows) -> "_BoundDeviceRows":
        key = (self.rows.version, rows.tobytes())
        if self._bound is None or self._bound[0] != key:
            self._bound = (key, self._derive(rows.copy()))
        return self._bound[1]

    def _derive(self, rows: Rows) -> "_BoundDeviceRows":
        options, device = self.rows, self._link.device
        state = options.draws[rows]
        stream, temperature, log_min_p, top_k, top_p, row = upload_columns(
            self._link,
            [
                state["stream"].view(np.int64),
                state["temperature"].astype(np.float32),
                state["log_min_p"].astype(np.float32),
                state["top_k"].astype(np.int32),
                state["top_p"].astype(np.float64),
                rows,
            ],
        )
        is_sampled = state["temperature"] > 0.0
        draws = Draws(
            *(stream, temperature, log_min_p, top_k, top_p),
            any_sampled=bool(is_sampled.any()),
            any_top_k=bool((is_sampled & (state["top_k"] > 0)).any()),
            any_top_p=bool((is_sampled & (state["top_p"] < 1.0)).any()),
        )
        num_rows, vocab_size = len(rows), options.vocab_size
        return _BoundDeviceRows(
            rows,
            row,
            draws,
            bind_edits(options, rows, self._counts, self._link),
            _bind_logprobs(options, rows, self._link),
            _bind_listed(options, rows, self._link),
            Workspace(num_rows, vocab_size, device),
            Scan.empty((num_rows, vocab_size), device),
            Scan.empty((num_rows, vocab_size), device),
        )

    def _edit(
        self,
        logits: torch.Tensor,
        bound: "_BoundDeviceRows",
        step: StepInputs,
        masks: RowMasks | None,
    ) -> Scan:
        """Apply masks and options to the logits, in place. Returns a scan of the result."""
        if masks:
            forbid_by_masks(logits, bound.rows, masks, self._link)
        for edit in bound.edits.edits:
            edit(logits, step)
        scan_logits(logits, bound.edited_scan)
        return bound.edited_scan

    def _upload(self, bound: "_BoundDeviceRows") -> StepInputs:
        """Upload the lengths of the rows, and the spans of their uncounted tokens."""
        lengths = self._history.num_tokens[bound.rows].astype(np.int64)
        spans = bound.edits.spans(lengths)
        longest = int((spans[:, 3] - spans[:, 2]).max(initial=0))
        length, span = upload_columns(self._link, [lengths, spans])
        return StepInputs(length, self._history.token_ids, span, longest)


def warm_up(vocab_size: int, max_len: int, link: DeviceLink) -> None:
    """Compile or load the kernels of all options, so that no later step waits for them.

    `max_len` is the length of the rows in the samplers' history.
    """
    rows = SamplingRows(1, vocab_size)
    token_ids = torch.zeros((1, max_len), dtype=torch.int32, device=link.device)
    sampler = DeviceSampler(rows, DeviceHistory(token_ids, np.ones(1, dtype=np.int64)), link)
    everything = DecodingParams(
        max_tokens=1,
        top_k=1,
        top_p=0.5,
        min_p=0.5,
        logprobs=1,
        logprob_token_ids=(0,),
        repetition_penalty=2.0,
        min_tokens=1,
        end_token_ids=(0,),
        logit_bias=((0, 1.0),),
        bad_words=((0,),),
    )
    rows.set_row(0, everything, 0, 1)
    logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=link.device)
    mask = b"\xff" * ((vocab_size + 7) // 8)
    sampler.sample(logits, np.zeros(1, dtype=np.int64), {0: mask}).fetch()
    sampler.prompt_logprobs(logits, np.zeros(1, dtype=np.int64), 1).fetch()


@dataclass(frozen=True, slots=True)
class _BoundLogprobs:
    """The n lines of the logits that need log-probabilities."""

    #: [n], on the host.
    lines: Rows
    #: [n], on the host: the number of best tokens that each line's request wants.
    num_top: Int32s
    #: [n] int64 on the device: the lines, for torch.
    line: torch.Tensor
    #: [n] int32 on the device: the lines, for kernels.
    line32: torch.Tensor
    #: [n] on the device: 0 to n - 1.
    index: torch.Tensor
    #: [n] on the device: the values of `num_top`.
    num_top_there: torch.Tensor
    #: [n, 1] on the device: divides the logits; None if all are 1.
    temperature: torch.Tensor | None

    def source(
        self, logits: torch.Tensor, scan: Scan, *, are_edited: bool
    ) -> tuple[torch.Tensor, Scan, LogprobQueries]:
        """The logits for log-probabilities, their scan, and the queries with their lines.

        The logits are copied if options will edit them, or if a temperature divides them.
        """
        if not are_edited and self.temperature is None:
            return logits, scan, LogprobQueries(self.line32, self.line32, self.num_top_there)
        raw = logits.index_select(0, self.line)
        if self.temperature is not None:
            raw.div_(self.temperature)
        scan = Scan.empty(raw.shape, raw.device)
        scan_logits(raw, scan)
        return raw, scan, LogprobQueries(self.index, self.line32, self.num_top_there)


@dataclass(frozen=True, slots=True)
class _BoundListed:
    """The m tokens in logprob_token_ids of all rows, concatenated."""

    #: Row -> the tokens that its request lists.
    of_row: dict[int, Ints]
    #: Row -> the index of its first listed token.
    first: dict[int, int]
    #: [m]: the index in `_BoundLogprobs.lines` of the line that each token belongs to.
    query: torch.Tensor
    #: [m] int64: the tokens.
    token: torch.Tensor

    def differences(
        self, logits: torch.Tensor, scan: Scan, queries: LogprobQueries
    ) -> torch.Tensor:
        """The logit of each token minus the largest of its line, [m] fp32."""
        line = queries.line.index_select(0, self.query)
        largest = scan.tile_largest.index_select(0, line).amax(dim=1)
        return logits[line.long(), self.token] - largest

    def entry(self, entry: TokenLogprobs, row: int, differences: Int32s) -> TokenLogprobs:
        """`entry`; if the row's request lists tokens, they replace the best token.

        `differences` are the values of the method `differences`, as the int32 bits of fp32.
        """
        if row not in self.of_row:
            return entry
        token_ids, first = self.of_row[row], self.first[row]
        own = differences[first : first + len(token_ids)].view(np.float32)
        return related(entry, own.astype(np.float64), token_ids)


@dataclass(frozen=True, slots=True)
class _BoundDeviceRows:
    """The data that is derived from one set of rows and their options.

    The scans and the workspace have no content that outlasts a step.
    """

    rows: Rows
    #: The rows, on the device.
    row: torch.Tensor
    draws: Draws
    edits: BoundEdits
    logprobs: _BoundLogprobs | None
    listed: _BoundListed | None
    workspace: Workspace
    raw_scan: Scan
    edited_scan: Scan

    @property
    def shape_of_entries(self) -> tuple[int, int]:
        """The shape of the entries that `token_logprobs` fills in."""
        if self.logprobs is None:
            return 0, 0
        return len(self.logprobs.lines), _width(self.logprobs.num_top)

    @property
    def parts(self) -> tuple[slice, slice, slice, slice]:
        """The slices of a step's int32 output: R tokens, R row states (SAMPLED, BROKEN or EMPTY),
        the log-probability entries, and the logit differences of listed tokens."""
        num_rows, (num_entries, width) = len(self.rows), self.shape_of_entries
        second, third = _aligned(num_rows), 2 * _aligned(num_rows)
        fourth = third + _aligned(num_entries * width)
        num_listed = 0 if self.listed is None else len(self.listed.token)
        return (
            slice(0, num_rows),
            slice(second, second + num_rows),
            slice(third, third + num_entries * width),
            slice(fourth, fourth + num_listed),
        )


def _bind_logprobs(options: SamplingRows, rows: Rows, link: DeviceLink) -> _BoundLogprobs | None:
    lines = np.flatnonzero(options.num_logprobs[rows] != NO_LOGPROBS)
    if len(lines) == 0:
        return None
    num_top = np.minimum(options.num_logprobs[rows[lines]], options.vocab_size).astype(np.int32)
    temperature = options.logprob_temperature[rows[lines]].reshape(-1, 1)
    line, line32, index, num_top_there, temperature_there = upload_columns(
        link,
        [
            *(lines, lines.astype(np.int32), np.arange(len(lines), dtype=np.int32)),
            *(num_top, temperature),
        ],
    )
    divides = bool((temperature != 1.0).any())
    return _BoundLogprobs(
        *(lines, num_top, line, line32, index, num_top_there),
        temperature_there if divides else None,
    )


def _bind_listed(options: SamplingRows, rows: Rows, link: DeviceLink) -> _BoundListed | None:
    of_row = {
        row: options.logprob_token_ids[row]
        for row in rows.tolist()
        if row in options.logprob_token_ids
    }
    if not of_row:
        return None
    asking = rows[options.num_logprobs[rows] != NO_LOGPROBS].tolist()
    counts = [len(token_ids) for token_ids in of_row.values()]
    queries = np.repeat([asking.index(row) for row in of_row], counts).astype(np.int64)
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    query, token = upload_columns(link, [queries, np.concatenate(list(of_row.values()))])
    return _BoundListed(of_row, dict(zip(of_row, starts, strict=True)), query, token)


def _aligned(count: int) -> int:
    """The count of int32 rounded up to a multiple of 16 bytes.

    Triton compiles a kernel once for pointers aligned to 16 bytes and once for others, so all parts
    are aligned.
    """
    return -(-count // 4) * 4


def _width(num_top: Int32s) -> int:
    """The size of an entry, in int32, with room for the largest number of best tokens."""
    return token_logprobs.HEADER + 2 * int(num_top.max(initial=0))


def _entries(values: Int32s, token_ids: Ints, num_top: Int32s) -> list[TokenLogprobs]:
    """The entries in `values` [n, width], which `token_logprobs` filled in."""
    header, num_best = token_logprobs.HEADER, (values.shape[1] - token_logprobs.HEADER) // 2
    ranks = values[:, 1].tolist()
    best = values[:, header : header + num_best].tolist()
    logprobs = np.ascontiguousarray(values).view(np.float32)
    own, of_best = logprobs[:, 0].tolist(), logprobs[:, header + num_best :].tolist()
    return [
        TokenLogprobs(token_id, own[i], ranks[i], tuple(best[i][:k]), tuple(of_best[i][:k]))
        for i, (token_id, k) in enumerate(zip(token_ids.tolist(), num_top.tolist(), strict=True))
    ]


class _Nothing:
    """The result of a step without rows."""

    def fetch(self) -> SampledTokens:
        return SampledTokens(np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step's tokens, which are being copied to the host."""

    bound: _BoundDeviceRows
    download: Download

    def fetch(self) -> SampledTokens:
        values: Int32s = self.download.wait()
        rows, logprobs = self.bound.rows, self.bound.logprobs
        found, state, entries, differences = (values[part] for part in self.bound.parts)
        token_ids = found.astype(np.int64)
        result = sampled_tokens(rows, token_ids, state == BROKEN, state == EMPTY)
        if logprobs is not None:
            entries_of_lines = _entries(
                entries.reshape(self.bound.shape_of_entries),
                token_ids[logprobs.lines],
                logprobs.num_top,
            )
            listed = self.bound.listed
            for line, entry in zip(logprobs.lines.tolist(), entries_of_lines, strict=True):
                if state[line] == SAMPLED:
                    row = int(rows[line])
                    result.logprobs[row] = (
                        entry if listed is None else listed.entry(entry, row, differences)
                    )
        return result


@dataclass(frozen=True, slots=True)
class _PendingEntries:
    """A prompt's log-probabilities, which are being copied to the host."""

    token_ids: Ints
    num_top: Int32s
    download: Download

    def fetch(self) -> list[TokenLogprobs]:
        return _entries(self.download.wait(), self.token_ids, self.num_top)
