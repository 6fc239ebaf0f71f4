"""A drafter that is a smaller model, with the same tokens for the most part.

It computes a row's tokens only when drafts are ordered for the row. Its first run then catches up
on all tokens for which it has no K and V, and gives the first draft; each further run computes the
previous draft of all rows together. The last draft of a row is not computed, since nothing follows
it; if it is accepted, the next first run computes it.

    tokens of the row     t0 t1 ... t(n-1)          reached: r
    first run             computes tr .. t(n-1)     draft d1
    run 2                 computes d1               draft d2
    ...
    run k                 computes d(k-1)           draft dk

A row gets fewer drafts than ordered if a draft ends the sequence, or if the model is not sure
enough of it (`core.draft_stops`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, LayerKV
from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.step import Drafted, DraftOrder
from quire.kernels.cpu.library import NativeKernels
from quire.models.interface import CausalLM
from quire.runtime.batch import RowBatch, StepBatch
from quire.runtime.block_tables import Int64
from quire.runtime.draft_batch import DraftBatch
from quire.runtime.draft_runs import DraftRuns
from quire.runtime.drafters import Drafter, fastest
from quire.runtime.token_pairs import TokenPairs
from quire.sampling.host.draft_sampler import DraftSampler

MOST_JOINED = 2
"""Maximum number of tokens of a row in the first run of all rows: an accepted last draft, which has
no K and V, and the last token. A row that lacks more catches up in runs of its own before."""

MEASURED_CHUNK = 64
"""The number of tokens of a measured chunk."""


class _LastDrafts(NamedTuple):
    """The last drafts of a row, whose outcome shows in the row's tokens."""

    #: The row's number of tokens before the drafts.
    num_tokens: int
    #: The drafts that were computed: all but the last.
    computed: tuple[int, ...]


class DraftModel(Drafter):
    """A drafter made of a model that generates text, without states."""

    needs_hidden = False

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        layers: tuple[LayerKV, ...],
        rows: RowBatch,
        sampler: DraftSampler,
        num_blocks: int,
        kernels: NativeKernels | None = None,
        pairs: TokenPairs | None = None,
    ) -> None:
        """See `Drafter`. `pairs` is None if both models have the same token ids."""
        batch = DraftBatch(rows, model.vocab_size, pairs)
        super().__init__(model, backend, layers, rows, batch, sampler, num_blocks, kernels)
        self.model = model
        self._pairs = pairs
        self._pending: dict[int, _LastDrafts] = {}

    def _admit(self, row: int, num_computed: int) -> None:
        self._pending.pop(row, None)

    def _copy(self, row: int, source: int) -> None:
        self._pending.pop(row, None)

    def _cut(self, row: int, num_tokens: int) -> None:
        self._pending.pop(row, None)

    def follow(self, step: StepBatch, hidden: torch.Tensor) -> None:
        """See `Drafter`; not called, since the model reads tokens alone."""

    def reset(self) -> None:
        """See `Drafter`."""
        self._pending.clear()

    def draft(self, orders: Sequence[DraftOrder]) -> Mapping[int, Drafted]:
        """See `Drafter`."""
        drafts: dict[int, DraftRuns] = {}
        num_tokens: dict[int, int] = {}
        # First, let each row catch up, except for the last tokens of rows that get drafts.
        for order in orders:
            row, length = order.row, int(self._rows.num_tokens[order.row])
            num_tokens[row] = length
            if self._catch_up(order, length) and order.num_drafts:
                drafts[row] = DraftRuns(order)
        # Then run all rows together, once for each draft; a row leaves when it has its drafts.
        if drafts:
            self._run_first(drafts, num_tokens)
        place = 1
        while going := [row for row, found in drafts.items() if found.goes_on]:
            self._run_next(going, drafts, num_tokens, place)
            place += 1
        # Last, remember which drafts have K and V if they turn out to be right.
        for row, found in drafts.items():
            self._pending[row] = _LastDrafts(num_tokens[row], tuple(found.token_ids[:-1]))
        reached = {row: self._blocks.num_reached(row, length) for row, length in num_tokens.items()}
        return {
            row: drafts[row].drafted(count) if row in drafts else Drafted((), count)
            for row, count in reached.items()
        }

    def _catch_up(self, order: DraftOrder, num_tokens: int) -> bool:
        """Compute a row's missing tokens but for the last ones, at most `order.most_tokens`.

        Returns whether only the tokens are missing that the run of all rows computes.
        """
        row = order.row
        self._settle(row)
        first = min(self._blocks.num_reached(row, num_tokens), num_tokens - 1)
        if num_tokens - first <= MOST_JOINED:
            return True
        end = min(num_tokens - 1, first + order.most_tokens)
        for start in range(first, end, self._rows.max_num_tokens):
            count = min(self._rows.max_num_tokens, end - start)
            self._run_chunk(row, start, count)
            self._blocks.count(row, start, start + count)
        return end == num_tokens - 1

    def _settle(self, row: int) -> None:
        """Count the last drafts of a row that were accepted."""
        pending = self._pending.pop(row, None)
        if pending is None:
            return
        first = pending.num_tokens
        known = self._rows.token_ids[row, first : int(self._rows.num_tokens[row])].tolist()
        num_right = 0
        for draft, token_id in zip(pending.computed, known, strict=False):
            if draft != token_id:
                break
            num_right += 1
        self._blocks.count(row, first, first + num_right)

    def _run_first(self, drafts: Mapping[int, DraftRuns], num_tokens: Mapping[int, int]) -> None:
        """Compute the missing tokens of rows, and add their first drafts."""
        firsts = {
            row: min(self._blocks.num_reached(row, num_tokens[row]), num_tokens[row] - 1)
            for row in drafts
        }
        # Rows with one token come first.
        rows = np.array(sorted(drafts, key=lambda row: num_tokens[row] - firsts[row]), np.int64)
        lengths = np.array([num_tokens[row] for row in rows.tolist()], np.int64)
        starts = np.array([firsts[row] for row in rows.tolist()], np.int64)
        counts = lengths - starts
        if int(counts.sum()) > self._rows.max_num_tokens:
            for row, start, count in zip(
                rows.tolist(), starts.tolist(), counts.tolist(), strict=True
            ):
                if count > 1:
                    self._run_chunk(row, start, count - 1)
            starts, counts = lengths - 1, np.ones_like(counts)
        if int(counts.max()) == 1:
            step = self._batch.singles(rows, starts)
            hidden = self._run(step)
        else:
            step = self._batch.spans(rows, starts, counts)
            hidden = self._run(step)[step.sample_index]
        for row in rows.tolist():
            self._blocks.count(row, firsts[row], num_tokens[row])
        self._add(drafts, rows, lengths, hidden)

    def _run_next(
        self,
        going: list[int],
        drafts: Mapping[int, DraftRuns],
        num_tokens: Mapping[int, int],
        place: int,
    ) -> None:
        """Compute the last drafts of rows, and add the drafts after them."""
        rows = np.array(sorted(going), np.int64)
        positions = np.array([num_tokens[row] + place - 1 for row in rows.tolist()], np.int64)
        self._rows.token_ids[rows, positions] = [drafts[row].token_ids[-1] for row in rows.tolist()]
        hidden = self._run(self._batch.singles(rows, positions))
        self._add(drafts, rows, positions + 1, hidden)

    def _add(
        self,
        drafts: Mapping[int, DraftRuns],
        rows: Int64,
        positions: Int64,
        hidden: torch.Tensor,
    ) -> None:
        """Sample a draft for each row at its position. A row without usable logits gets none."""
        found = self._sampler.sample(self._logits(hidden), rows, positions)
        for row, *draft in zip(rows.tolist(), *(each.tolist() for each in found), strict=True):
            drafts[row].add(*draft)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._forward.logits(hidden)
        return logits if self._pairs is None else self._pairs.at_target_ids(logits)

    def _run_chunk(self, row: int, first: int, count: int) -> None:
        one = np.array([row], np.int64)
        self._run(self._batch.spans(one, np.array([first], np.int64), np.array([count], np.int64)))

    def measure(self) -> DrafterCosts:
        """See `Drafter`. Also measures a chunk."""
        costs = super().measure()
        chunk = min(MEASURED_CHUNK, self._rows.max_num_tokens, self._rows.token_ids.shape[1] - 1)
        costs.token_s = fastest(lambda: self._run_chunk(0, 0, chunk)) / chunk
        return costs
