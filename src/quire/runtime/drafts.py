"""The drafts that a step verifies, in the order in which they are verified.

`core.step` says how drafts are verified. `batch.RowBatch` finds a step's drafts, and `model_runner`
verifies them in rounds. Round i verifies draft i of each row, counted from 0, and samples the token
after it. Before the rounds, rows whose tokens depend only on logits are sampled at all positions at
once.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.core.step import StepPlan
from quire.runtime.block_tables import Int32, Int64

Bools = npt.NDArray[np.bool_]


class DraftRound(NamedTuple):
    """The drafts that are verified in one round, with at most one draft of a row."""

    rows: Int64
    #: Parallel to `rows`.
    token_ids: Int64


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """All D drafts of a step: the first draft of each row, then the second ones, and so on."""

    #: The number of drafts of each sequence of the step.
    counts: Int64
    rounds: tuple[DraftRound, ...]
    #: [D]: the index of each draft among the step's tokens. The hidden state of a draft predicts
    #: the token after it.
    index: torch.Tensor
    #: [D]: the row of each draft.
    rows: Int64
    #: [D]: the number of each draft's round, from 0.
    ahead: Int64
    #: [D]: the drafted tokens.
    token_ids: Int64

    def places(self, num_tokens: Int32, length: int) -> Int64:
        """[D]: the index of each draft in the flattened token ids of all rows.

        A row has `length` places; the first num_tokens[row] of them are its tokens.
        """
        return self.rows * length + num_tokens[self.rows] + self.ahead

    def lines_of(self, is_chosen: Bools) -> tuple[Int64, Int64, Int64]:
        """The drafts of the rows for which is_chosen [max_rows] holds: the index of each draft in
        `index`, its row, and the number of its round, from 0."""
        lines = np.flatnonzero(is_chosen[self.rows])
        return lines, self.rows[lines], self.ahead[lines]


def find_drafts(plan: StepPlan, rows: Int64, query_start: Int32) -> StepDrafts | None:
    """The drafts of a step that computes `rows` [S], whose tokens begin at query_start [S + 1].

    They are the last tokens of their sequences in the step. None if the plan has no drafts.
    """
    of_row = {chunk.row: chunk.draft_token_ids for chunk in plan.chunks if chunk.draft_token_ids}
    if not of_row:
        return None
    counts = [len(of_row.get(row, ())) for row in rows.tolist()]
    ends = query_start[1:].tolist()
    # In each round, list the row, the round, the token and the index of each draft.
    found: list[tuple[int, int, int, int]] = []
    bounds = [0]
    for place in range(max(counts)):
        for row, count, end in zip(rows.tolist(), counts, ends, strict=True):
            if place < count:
                found.append((row, place, of_row[row][place], end - count + place))
        bounds.append(len(found))
    of_drafts, ahead, token_ids, index = np.array(found, np.int64).T.copy()
    rounds = [DraftRound(of_drafts[a:b], token_ids[a:b]) for a, b in pairwise(bounds)]
    return StepDrafts(
        np.array(counts, np.int64),
        tuple(rounds),
        torch.from_numpy(index),
        of_drafts,
        ahead,
        token_ids,
    )
