"""The drafts that a step verifies, in the order in which they are verified.

`core.step` says how drafts are verified. `batch.RowBatch` finds a step's drafts, and `model_runner`
verifies them in rounds: a round samples after the first draft of each row, after the second, and so
on. Rows whose tokens depend on nothing but logits are sampled before, at all positions at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.core.step import StepPlan
from quire.runtime.block_tables import Int32, Int64

Bools = npt.NDArray[np.bool_]


class DraftRound(NamedTuple):
    """The drafts at one place behind the tokens of their rows."""

    rows: Int64
    #: Parallel to `rows`.
    token_ids: Int64


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """All D drafts of a step: the first draft of each row, the second ones, and so on."""

    #: The number of drafts of each sequence of the step.
    counts: Int64
    rounds: tuple[DraftRound, ...]
    #: [D]: the index of each draft among the step's tokens. The hidden state of a draft predicts
    #: the token after it.
    index: torch.Tensor

    def places(self, num_tokens: Int32, length: int) -> Int64:
        """[D]: the index of each draft in the flattened token ids of all rows.

        A row has `length` places, of which its tokens take num_tokens[row].
        """
        return np.concatenate(
            [rows * length + num_tokens[rows] + at for at, (rows, _) in enumerate(self.rounds)]
        )

    @property
    def token_ids(self) -> Int64:
        """[D]: the drafted tokens."""
        return np.concatenate([drafts.token_ids for drafts in self.rounds])

    def lines_of(self, is_chosen: Bools) -> tuple[Int64, Int64, Int64]:
        """The drafts of the rows for which is_chosen [max_rows] holds: the index of each draft in
        `index`, its row, and the number of its round, from 0."""
        rows = np.concatenate([drafts.rows for drafts in self.rounds])
        sizes = [len(drafts.rows) for drafts in self.rounds]
        lines = np.flatnonzero(is_chosen[rows])
        return lines, rows[lines], np.repeat(np.arange(len(sizes)), sizes)[lines]


def find_drafts(plan: StepPlan, rows: Int64, query_start: Int32) -> StepDrafts | None:
    """The drafts of a step that computes `rows` [S], whose tokens begin at query_start [S + 1].

    They are the last tokens of their sequences in the step. None if the plan has no drafts.
    """
    of_row = {chunk.row: chunk.draft_token_ids for chunk in plan.chunks if chunk.draft_token_ids}
    if not of_row:
        return None
    counts = np.array([len(of_row.get(row, ())) for row in rows.tolist()], np.int64)
    firsts = query_start[1:] - counts
    rounds: list[DraftRound] = []
    index: list[Int64] = []
    for place in range(int(counts.max())):
        has_draft = counts > place
        token_ids = [of_row[row][place] for row in rows[has_draft].tolist()]
        rounds.append(DraftRound(rows[has_draft], np.array(token_ids, np.int64)))
        index.append(firsts[has_draft] + place)
    return StepDrafts(counts, tuple(rounds), torch.from_numpy(np.concatenate(index)))
