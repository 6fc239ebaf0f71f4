"""The rotary positions of a step's tokens in models with three axes: frame, row and column.

Block tables, slots and random numbers are about a token's index in its sequence. Its rotation is
about its rotary positions. The tokens of an image have the positions of its grid, and the text
after the image continues from the largest of them. So rotary positions differ from the index from
the first image on. Called by `batch.py`.

The positions are those that transformers computes for Qwen3-VL (arXiv:2511.21631).
"""

from collections.abc import Sequence

import numpy as np
import torch

from quire.core.content_spans import ContentSpan, spans_between
from quire.layers.rotary import AxisRotations
from quire.runtime.block_tables import Int64


class AxisPositions:
    """The spans of all rows, and the rows of the rotary tables that a step's tokens have.

    Invariant: `_shifts[row]` is the rotary position minus the index of each token after the row's
    last span; it is 0 without spans.
    """

    def __init__(self, rotations: AxisRotations | None, num_rows: int) -> None:
        """`rotations` are those of the model. Without them, all rotary positions are indices."""
        self._rotations = rotations
        self._spans: dict[int, tuple[ContentSpan, ...]] = {}
        self._ends: Int64 = np.zeros(num_rows, np.int64)
        self._shifts: Int64 = np.zeros(num_rows, np.int64)

    def set_row(self, row: int, spans: Sequence[ContentSpan]) -> None:
        """Replace the spans of a row. Each has a grid if the model has three axes."""
        self._spans.pop(row, None)
        self._ends[row] = self._shifts[row] = 0
        if spans and self._rotations is not None:
            self._spans[row] = tuple(spans)
            self._ends[row] = spans[-1].end
            self._shifts[row] = sum(map(_shift_behind, spans))

    def fork(self, row: int, source: int) -> None:
        """Give a row the spans of another."""
        self.set_row(row, self._spans.get(source, ()))

    def of_decodes(self, rows: Int64, indices: Int64) -> Int64:
        """The table rows of tokens at indices [S], one of each row, as the step's first tokens."""
        if not self._spans:
            return indices
        found = indices + self._shifts[rows]
        for token in np.flatnonzero(indices < self._ends[rows]):
            found[token] = self.of_chunk(int(rows[token]), int(indices[token]), 1, int(token))[0]
        return found

    def of_chunk(self, row: int, first: int, count: int, token: int) -> Int64:
        """The table rows of `count` tokens of a row from index `first` on.

        `token` is the first one's number in the step. Composes rows of the rotary tables where
        positions differ by axis.
        """
        found = np.arange(first, first + count)
        spans = self._spans.get(row, ())
        # First, shift all tokens after each span.
        for span in spans:
            if span.end < first + count:
                found[max(span.end - first, 0) :] += _shift_behind(span)
        # Then, compose the rows of the tokens inside spans.
        for span in spans_between(spans, first, first + count):
            begin, end = max(span.first_position, first), min(span.end, first + count)
            start = span.first_position + sum(
                _shift_behind(each) for each in spans if each.end <= span.first_position
            )
            offsets = slice(begin - span.first_position, end - span.first_position)
            places = _grid_positions(span)[:, offsets]
            tokens = token + np.arange(begin - first, end - first)
            assert self._rotations is not None, "rows have spans only if there are three axes"
            self._rotations.compose(torch.from_numpy(tokens), torch.from_numpy(start + places))
            found[begin - first : end - first] = self._rotations.first_row + tokens
        return found


def _shift_behind(span: ContentSpan) -> int:
    """The number by which positions after a span increase, minus its number of tokens."""
    assert span.grid is not None, "the spans of a model with three axes have grids"
    return max(span.grid[1:]) - span.num_tokens


def _grid_positions(span: ContentSpan) -> Int64:
    """The frames, rows and columns [3, num_tokens] of a span's tokens, from 0."""
    assert span.grid is not None
    return np.indices(span.grid).reshape(3, -1)
