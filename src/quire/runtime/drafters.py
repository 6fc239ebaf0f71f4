"""Drafters: models, or heads of the model, that propose drafts on the device.

    each plan        change(plan)             the rows have changed
    before a step    draft(orders)            the drafts of some rows, which the step verifies
    after a step     follow(step, hidden)     the step's hidden states, if `needs_hidden`

A drafter has attention layers of its own. Their K and V are in the same blocks as those of the
model: their layers follow the model's in the layout of pages, so that shared, copied and kept
blocks have them, too. A drafter reads the rows' tokens and tables (`batch.RowBatch`), and never
changes the tokens and counts of a row. So a drafter that is wrong, or has wrong K and V, makes
drafts worse, but changes no token. `model_runner` calls drafters; `draft_model` and `draft_head`
have them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, LayerKV
from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.step import Drafted, DraftOrder, EditKind, StepPlan
from quire.kernels.cpu.library import NativeKernels
from quire.models.interface import TextModel
from quire.runtime.batch import RowBatch, StepBatch
from quire.runtime.draft_batch import DraftBatch
from quire.runtime.drafted_blocks import DraftedBlocks
from quire.runtime.forward import make_forward
from quire.sampling.host.draft_sampler import DraftSampler

MEASURED_ROWS, NUM_REPEATS = 8, 5
"""The rows of measured runs, and how often each run is repeated."""


class Drafter(ABC):
    """Proposes the tokens that follow rows' tokens."""

    #: Whether `follow` must be called after each step.
    needs_hidden: ClassVar[bool]

    def __init__(
        self,
        model: TextModel,
        backend: AttentionBackend,
        layers: tuple[LayerKV, ...],
        rows: RowBatch,
        batch: DraftBatch,
        sampler: DraftSampler,
        num_blocks: int,
        kernels: NativeKernels | None,
    ) -> None:
        """`backend` is bound here to `layers`, the memory of the K and V of `model`. `rows` are
        those of the model that verifies, whose KV cache has `num_blocks` blocks. `batch` builds the
        runs."""
        self._rows = rows
        self._batch = batch
        self._sampler = sampler
        self._block_size = layers[0].format.block_size
        backend.bind(model.attention_specs, layers)
        self._forward = make_forward(model, backend, kernels, rows.max_num_tokens)
        groups = [layer.group for layer in layers]
        self._blocks = DraftedBlocks(num_blocks, rows.tables, rows.num_computed, groups)

    def change(self, plan: StepPlan) -> None:
        """Learn of a plan's changes, which were made to the rows and copied within the KV cache."""
        self._blocks.change(plan)
        for admission in plan.admit:
            self._admit(admission.row, admission.num_computed_tokens)
        for fork in plan.forks:
            self._copy(fork.row, fork.source_row)
        for edit in plan.table_edits:
            if edit.kind is EditKind.TRUNCATE:
                self._cut(edit.row, edit.first_logical_block * self._block_size)

    @abstractmethod
    def _admit(self, row: int, num_computed: int) -> None:
        """A new sequence has the row, with K and V of num_computed tokens of the model."""

    @abstractmethod
    def _copy(self, row: int, source: int) -> None:
        """A new sequence has the row, whose tokens and blocks are those of the row `source`."""

    @abstractmethod
    def _cut(self, row: int, num_tokens: int) -> None:
        """The row keeps the K and V of at most its first `num_tokens` tokens."""

    def forget(self, blocks: Iterable[int]) -> None:
        """Learn that the contents of these blocks were replaced, by a load from a tier."""
        self._blocks.forget(blocks)

    @abstractmethod
    def draft(self, orders: Sequence[DraftOrder]) -> Mapping[int, Drafted]:
        """Carry out the orders, by row. All tokens of these rows are known.

        K and V of drafts go to the slots after the rows' tokens.
        """

    @abstractmethod
    def follow(self, step: StepBatch, hidden: torch.Tensor) -> None:
        """Take the hidden states [T, H] of a step, whose tokens were sampled and stored: `rows`
        have their new lengths, accepted drafts included. Valid until the next step."""

    @abstractmethod
    def reset(self) -> None:
        """Learn that all rows were dropped. K and V of whole blocks stay valid."""

    @abstractmethod
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of the vocabulary of the model that verifies."""

    def _run(self, step: StepBatch) -> torch.Tensor:
        self._forward.plan(step)
        return self._forward(step)

    def measure(self) -> DrafterCosts:
        """Measure runs of one row and of several, each as the fastest of a few.

        They overwrite the first block of the KV cache, so no row may be live yet.
        """
        rows = min(MEASURED_ROWS, len(self._rows.num_tokens))
        one_s, rows_s = self._time_singles(1), self._time_singles(rows)
        row_s = max(0.0, rows_s - one_s) / max(1, rows - 1)
        return DrafterCosts(max(0.0, one_s - row_s), row_s, 0.0)

    def _time_singles(self, count: int) -> float:
        rows, positions = np.arange(count), np.zeros(count, np.int64)

        def run() -> None:
            hidden = self._run(self._batch.singles(rows, positions))
            self._sampler.sample(self._logits(hidden), rows, positions + 1)

        return fastest(run)


def fastest(run: Callable[[], None]) -> float:
    """The seconds of the fastest of some runs."""
    taken: list[float] = []
    for _ in range(NUM_REPEATS):
        began_s = perf_counter()
        run()
        taken.append(perf_counter() - began_s)
    return min(taken)
