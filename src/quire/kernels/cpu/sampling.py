"""Chooses tokens and computes log-probabilities, by the native library.

The kernels are in `csrc/sampling`. The sampler calls this module if the library is loaded, and
otherwise torch. `sampling.choice` and `sampling.logprobs` define the computation.

Legend: R requested rows, L lines of logits, V tokens of the vocabulary, k best tokens.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels

SAMPLE_ROW: np.dtype[Any] = np.dtype(abi.SampleRow)
"""Parameters of one line: stream, position, top_p (1 is no limit), top_k (0 is no limit),
temperature (0 takes the largest logit), log_min_p (-inf is no limit)."""

LOGPROB_ROW: np.dtype[Any] = np.dtype(abi.LogprobRow)
"""A request for log-probabilities of one line: line, token_id, num_top."""

Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]
Float32s = npt.NDArray[np.float32]
Records = npt.NDArray[Any]


class NativeSampling:
    """The sampling functions of one set of kernels."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels

    def bind(self, rows: Records) -> "SamplingCall":
        """An object that samples these rows, [R] records of SAMPLE_ROW, in each step."""
        return SamplingCall(self.kernels, rows)

    def largest(self, logits: torch.Tensor) -> Float32s:
        """The largest value [L] of each line of logits [L, V] fp32; NaN if the line has a NaN."""
        num_lines, vocab_size = logits.shape
        index, largest = np.empty(num_lines, np.int64), np.empty(num_lines, np.float32)
        self.kernels.library.argmax(
            self.kernels.context,
            logits.data_ptr(),
            _line_stride(logits),
            num_lines,
            vocab_size,
            index.ctypes.data,
            largest.ctypes.data,
        )
        return largest

    def forbid(self, logits: torch.Tensor, lines: Int64s, words: Uint32s) -> None:
        """Exclude tokens from lines of logits [L, V] fp32, in place.

        `lines` [n] are distinct. A line keeps the tokens whose bits are set in its row of `words`
        [n, ceil(V / 32)]. Token t has bit t % 32 of word t // 32.
        """
        vocab_size = logits.shape[1]
        _check_masks(logits, lines, words)
        self.kernels.library.forbid(
            self.kernels.context,
            logits.data_ptr(),
            _line_stride(logits),
            vocab_size,
            lines.ctypes.data,
            words.ctypes.data,
            words.shape[1],
            len(lines),
        )

    def token_logprobs(self, logits: torch.Tensor, rows: Records) -> tuple[Float32s, Int64s]:
        """Log-probabilities and tokens, each [R, 1 + k], k the largest num_top of the rows.

        Column 0 has the log-probability of the row's token, and its rank, from 1. The next num_top
        columns have the log-probabilities and ids of the best tokens, best first. Among equal
        logits the lowest id is first. If the largest logit is not finite, column 0 is NaN and the
        others are not set.

        `logits` are [L, V] fp32. `rows` [R] are of LOGPROB_ROW, with num_top at most V.
        """
        num_lines, vocab_size = logits.shape
        assert rows.ndim == 1 and rows.dtype == LOGPROB_ROW and rows.flags.c_contiguous
        assert ((rows["line"] >= 0) & (rows["line"] < num_lines)).all()
        assert ((rows["token_id"] >= 0) & (rows["token_id"] < vocab_size)).all()
        width = 1 + int(rows["num_top"].max(initial=0))
        logprobs = np.empty((len(rows), width), np.float32)
        tokens = np.empty((len(rows), width), np.int64)
        self.kernels.library.token_logprobs(
            self.kernels.context,
            logits.data_ptr(),
            _line_stride(logits),
            vocab_size,
            rows.ctypes.data,
            len(rows),
            width,
            logprobs.ctypes.data,
            tokens.ctypes.data,
        )
        return logprobs, tokens


class SamplingCall:
    """Samples one set of rows. Addresses are looked up once, since at batch 1 a look-up costs as
    much as the call itself. Only the addresses of logits and positions are looked up in each
    call."""

    def __init__(self, kernels: NativeKernels, rows: Records) -> None:
        """`rows` [R] of SAMPLE_ROW are copied."""
        assert rows.ndim == 1 and rows.dtype == SAMPLE_ROW
        self._kernels = kernels  # keeps the context alive
        self._function = kernels.library.sample
        self._rows = np.array(rows, order="C")
        self._positions = self._rows["position"]
        self._token_ids = np.empty(len(rows), np.int64)
        self._largest = np.empty(len(rows), np.float32)
        self._raw_largest = np.empty(len(rows), np.float32)
        self._rows_address = self._rows.ctypes.data
        self._results = (len(rows), self._token_ids.ctypes.data, self._largest.ctypes.data)

    def run(
        self, logits: torch.Tensor, positions: npt.NDArray[np.integer[Any]] | None
    ) -> tuple[Int64s, Float32s]:
        """Sample from logits [R, V] fp32. Returns token ids [R] and the largest logits [R].

        `positions` [R] are the positions of the sampled tokens; None if all rows are greedy. If the
        largest logit is not finite, its token is chosen. The second result is valid until the next
        run.
        """
        num_lines, vocab_size = logits.shape
        assert num_lines == self._results[0], "logits are not of the rows that were bound"
        if positions is not None:
            self._positions[:] = positions
        self._function(
            self._kernels.context,
            logits.data_ptr(),
            _line_stride(logits),
            vocab_size,
            self._rows_address,
            *self._results,
        )
        return self._token_ids.copy(), self._largest

    def run_allowed(
        self,
        logits: torch.Tensor,
        positions: npt.NDArray[np.integer[Any]] | None,
        lines: Int64s,
        words: Uint32s,
    ) -> tuple[Int64s, Float32s, Float32s]:
        """Do `NativeSampling.forbid` and then `run`, line by line.

        The third result [R] has the largest logit of each line before tokens were excluded. Like
        the second, it is valid until the next run.
        """
        num_lines, vocab_size = logits.shape
        assert num_lines == self._results[0], "logits are not of the rows that were bound"
        _check_masks(logits, lines, words)
        if positions is not None:
            self._positions[:] = positions
        masks = np.full(num_lines, -1, np.int64)
        masks[lines] = np.arange(len(lines))
        self._kernels.library.sample_allowed(
            self._kernels.context,
            logits.data_ptr(),
            _line_stride(logits),
            vocab_size,
            self._rows_address,
            masks.ctypes.data,
            words.ctypes.data,
            words.shape[1],
            *self._results,
            self._raw_largest.ctypes.data,
        )
        return self._token_ids.copy(), self._largest, self._raw_largest


def _check_masks(logits: torch.Tensor, lines: Int64s, words: Uint32s) -> None:
    num_lines, vocab_size = logits.shape
    assert words.shape == (len(lines), -(-vocab_size // 32)) and words.flags.c_contiguous
    assert lines.flags.c_contiguous and ((lines >= 0) & (lines < num_lines)).all()


def _line_stride(logits: torch.Tensor) -> int:
    """The stride of lines, in elements, of logits that the library can read."""
    line_stride, token_stride = logits.stride()
    assert logits.dtype == torch.float32 and token_stride == 1 and logits.is_cpu
    return line_stride
