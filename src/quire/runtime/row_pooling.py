"""Makes vectors, or scores, of the hidden states of rows that pool.

A row's result is the same to the bit whatever runs beside it and however its prompt was chunked:
sums over tokens run in the tokens' order, in fp32, and what follows is done row by row. Called by
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
"""Vectors [R, H] -> [R, N] fp32, of a head."""

FAILED = "the model's result is not a number (NaN or infinite)"


@dataclass(frozen=True, slots=True)
class PendingPooled:
    """What a step pooled, maybe still being computed. groups: rows, their parameters, and their
    results [R, N] so far, or [R, T, N] where each token has one."""

    groups: list[tuple[list[int], list[PoolingParams], torch.Tensor]]

    def fetch(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """By row: results as `StepResult` has them, and why others have none. Waits for the
        device."""
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
    """The rows that pool, and of those that are under way what they have so far.

    Invariant: a row is in `_params` from its admission, as one that pools, to its release; in
    `_partial` while its first tokens are computed and its last is not.
    """

    def __init__(self, token_scores: Scores, head_scores: Scores) -> None:
        """token_scores: of the head that predicts tokens; head_scores: of the one that scores."""
        self._token_scores = token_scores
        self._head_scores = head_scores
        self._params: dict[int, PoolingParams] = {}
        self._partial: dict[int, tuple[torch.Tensor, int]] = {}  # the vector, of so many tokens

    def set_row(self, row: int, params: PoolingParams | None) -> None:
        """A row is admitted."""
        self.clear_row(row)
        if params is not None:
            self._params[row] = params

    def clear_row(self, row: int) -> None:
        """A row is released, or was never one that pools."""
        self._params.pop(row, None)
        self._partial.pop(row, None)

    def clear(self) -> None:
        """All rows are dropped."""
        self._params.clear()
        self._partial.clear()

    def take(self, step: StepBatch, hidden: torch.Tensor) -> tuple[PendingPooled, StepBatch]:
        """Take in what a step has computed, hidden [T, H]: the results of rows that end in it, and
        the step without these."""
        if not self._params:
            return NOTHING_POOLED, step
        pooled = self._take(step, hidden)
        keeps = np.array([row not in self._params for row in step.sample_rows.tolist()], np.bool_)
        return pooled, step if keeps.all() else without_pooling(step, keeps)

    def _take(self, step: StepBatch, hidden: torch.Tensor) -> PendingPooled:
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
        """The row's vector [H], or vectors [T, H], with the tokens that a step has computed."""
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
        """Those of a kind together: a head is applied to all of them at once. dtype: the head's."""
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
        """Vectors [R, H], or what the head that the parameters ask for says of them [R, N]."""
        if not params.wants_scores:
            return vectors
        if params.score_token_ids:
            return self._token_scores(vectors.to(dtype))[:, list(params.score_token_ids)]
        return self._head_scores(vectors.to(dtype))


def add_in_order(total: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """total [H] fp32, or nothing, plus hidden [T, H], one token after the other -> [H] fp32."""
    rows = hidden.float()
    if total is not None:
        rows = torch.cat([total[None], rows])
    # Neither's loop over the rows is split, as that of torch's `sum` is.
    if rows.device.type == "cpu":
        return torch.from_numpy(np.add.reduce(rows.numpy(), axis=0))
    lengths = torch.tensor([len(rows)], device=rows.device)
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)[0]


def without_pooling(step: StepBatch, keeps: npt.NDArray[np.bool_]) -> StepBatch:
    """The step with those rows alone that generate tokens. keeps: of its sample rows."""
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
    """A row's result [N] cut, normalised or put through its activation; or those of its tokens
    [T, N], each by itself."""
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
        # Both forms are the same; each where its exponential is at most 1.
        small = np.exp(-np.abs(scores))
        return np.where(scores >= 0, 1 / (1 + small), small / (1 + small))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: npt.NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return found
