"""Computes embeddings or scores (pooling) from the hidden states of a request's tokens.

A row's result is the same to the bit for any batch and any chunking of its prompt. Sums over tokens
are computed in fp32 in the tokens' order, and later operations row by row. Called by
`model_runner`.

Legend: T tokens of the step, H hidden size, R rows that end in the step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.core.pooling import Activation, PoolingKind, PoolingParams
from quire.runtime.batch import StepBatch

Scores = Callable[[torch.Tensor], torch.Tensor]
"""A head: computes scores [R, N] fp32 of vectors [R, H]."""

FAILED = "the model's result is not a number (NaN or infinite)"


@dataclass(frozen=True, slots=True)
class PendingPooled:
    """The pooled results of a step, which the device may still be computing."""

    #: For each group of rows: the rows, their parameters, and their results before `finish`: [R,
    #: N], or [R, T, N] if each token has a result.
    groups: list[tuple[list[int], list[PoolingParams], torch.Tensor]]

    def fetch(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """Wait for the device. Returns (row -> result in the format of `StepResult`, row -> reason
        why the row failed)."""
        pooled: dict[int, bytes] = {}
        failed: dict[int, str] = {}
        for rows, params, results in self.groups:
            for row, own, numbers in zip(rows, params, results.float().cpu().numpy(), strict=True):
                if np.isfinite(numbers).all():
                    pooled[row] = finish(numbers, own).tobytes()
                else:
                    failed[row] = FAILED
        return pooled, failed


NOTHING_POOLED = PendingPooled([])


class RowPooling:
    """The rows that pool, with the partial results of unfinished prompts.

    Invariant: a pooling row is in `_params` from its admission to its release. It is in `_partial`
    after its first tokens are computed, until its last token is computed.
    """

    def __init__(self, token_scores: Scores, head_scores: Scores) -> None:
        """`token_scores` is the head that predicts tokens, `head_scores` the head that scores."""
        self._token_scores = token_scores
        self._head_scores = head_scores
        self._params: dict[int, PoolingParams] = {}
        # For each row, the partial result and the number of tokens in it.
        self._partial: dict[int, tuple[torch.Tensor, int]] = {}

    def set_row(self, row: int, params: PoolingParams | None) -> None:
        """Begin a row at its admission. `params` is None if the row generates tokens instead."""
        self.clear_row(row)
        if params is not None:
            self._params[row] = params

    def clear_row(self, row: int) -> None:
        """Drop the row's parameters and partial result, if it pools."""
        self._params.pop(row, None)
        self._partial.pop(row, None)

    def clear(self) -> None:
        """Forget all rows."""
        self._params.clear()
        self._partial.clear()

    def add_hidden_states(
        self, step: StepBatch, hidden: torch.Tensor
    ) -> tuple[PendingPooled, StepBatch]:
        """Add the hidden states [T, H] of a step to its pooling rows.

        Returns the results of the rows that end in the step, and the step without pooling rows.
        """
        if not self._params:
            return NOTHING_POOLED, step
        pooled = self._pool_ended_rows(step, hidden)
        keeps = np.array([row not in self._params for row in step.sample_rows.tolist()], np.bool_)
        return pooled, step if keeps.all() else without_pooling(step, keeps)

    def _pool_ended_rows(self, step: StepBatch, hidden: torch.Tensor) -> PendingPooled:
        ends, ended = np.cumsum(step.num_new_tokens), frozenset(step.sample_rows.tolist())
        found: list[tuple[int, torch.Tensor]] = []
        for row, end, count in zip(step.rows.tolist(), ends, step.num_new_tokens, strict=True):
            params = self._params.get(row)
            if params is None:
                continue
            vector = self._add(row, params, hidden[end - count : end])
            if row in ended:
                del self._partial[row]
                found.append((row, vector))
        return PendingPooled(list(self._results(found, hidden.dtype)))

    def _add(self, row: int, params: PoolingParams, hidden: torch.Tensor) -> torch.Tensor:
        """Add a step's tokens to the row. Returns its vector [H], or vectors [T, H], so far."""
        before, num_before = self._partial.get(row, (None, 0))
        if params.kind is PoolingKind.LAST:
            vector = hidden[-1].clone()
        elif params.kind is PoolingKind.CLS:
            vector = hidden[0].clone() if before is None else before
        elif params.kind is PoolingKind.ALL:
            vector = hidden.clone() if before is None else torch.cat([before, hidden])
        else:
            vector = add_in_order(before, hidden)
        count = num_before + len(hidden)
        self._partial[row] = vector, count
        return vector / count if params.kind is PoolingKind.MEAN else vector

    def _results(
        self, vectors: list[tuple[int, torch.Tensor]], dtype: torch.dtype
    ) -> Iterable[tuple[list[int], list[PoolingParams], torch.Tensor]]:
        """The results, grouped by kind, so that a head is applied to many rows at once.

        `dtype` is that of the head.
        """
        kinds: dict[tuple[bool, tuple[int, ...]], list[tuple[int, torch.Tensor]]] = {}
        for row, vector in vectors:
            params = self._params[row]
            if params.kind is PoolingKind.ALL:
                yield [row], [params], self._scored(vector, params, dtype)[None]
            else:
                kind = params.wants_scores, params.score_token_ids
                kinds.setdefault(kind, []).append((row, vector))
        for group in kinds.values():
            rows = [row for row, _ in group]
            stacked = torch.stack([vector for _, vector in group])
            scored = self._scored(stacked, self._params[rows[0]], dtype)
            yield rows, [self._params[row] for row in rows], scored

    def _scored(
        self, vectors: torch.Tensor, params: PoolingParams, dtype: torch.dtype
    ) -> torch.Tensor:
        """The vectors [R, H] themselves, or their scores [R, N] if the parameters want scores."""
        if not params.wants_scores:
            return vectors
        if params.score_token_ids:
            return self._token_scores(vectors.to(dtype))[:, list(params.score_token_ids)]
        return self._head_scores(vectors.to(dtype))


def add_in_order(total: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Add hidden [T, H] to total [H] fp32, or to 0, in the tokens' order. Returns [H] fp32."""
    rows = hidden.float()
    if total is not None:
        rows = torch.cat([total[None], rows])
    # Both branches add the rows in order; torch's `sum` would split the loop.
    if rows.device.type == "cpu":
        return torch.from_numpy(np.add.reduce(rows.numpy(), axis=0))
    lengths = torch.tensor([len(rows)], device=rows.device)
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)[0]


def without_pooling(step: StepBatch, keeps: npt.NDArray[np.bool_]) -> StepBatch:
    """The step with only the sample rows that `keeps` selects, which generate tokens."""
    num_computing = len(step.sample_rows) - len(step.joined_lines)
    index, lines = step.sample_index, step.joined_lines
    kept = torch.from_numpy(np.flatnonzero(keeps[:num_computing])).to(index.device)
    places = torch.from_numpy(np.cumsum(keeps) - 1).to(lines.device)
    return replace(
        step,
        sample_rows=step.sample_rows[keeps],
        sample_index=index[:num_computing][kept],
        joined_lines=places[lines],
    )


def finish(numbers: npt.NDArray[np.float32], params: PoolingParams) -> npt.NDArray[np.float32]:
    """Apply the row's activation to scores, or cut and normalise its vectors.

    `numbers` is a row's result [N], or the results of its tokens [T, N], to which this applies one
    by one.
    """
    if params.wants_scores:
        scores = _activated(numbers.astype(np.float64), params.activation)
        return scores.astype(np.float32)
    vectors: npt.NDArray[np.float32] = numbers[..., : params.dimensions]
    if not params.normalize:
        return vectors
    lengths = np.sqrt(np.sum(np.square(vectors, dtype=np.float64), axis=-1, keepdims=True))
    units: npt.NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return units


def _activated(scores: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    if activation is Activation.NONE:
        return scores
    if activation is Activation.SIGMOID:
        # Both forms are equal; each is used where its exponential does not overflow.
        small = np.exp(-np.abs(scores))
        return np.where(scores >= 0, 1 / (1 + small), small / (1 + small))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: npt.NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return found
