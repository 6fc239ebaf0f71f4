"""Which adapter each row of the runner computes with, and what plans load.

Called by `runtime.model_runner` around each forward pass. Knows rows and slots by their numbers.

Shapes: R rows, S sequences of a step, T tokens of it.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from quire.adapters.adapter import LoRAAdapter
from quire.adapters.slots import AdapterSlots
from quire.core.adapters import NO_SLOT
from quire.core.step import StepPlan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class RowAdapters:
    """Invariant: the slot of a live row is that of its admission, or of the row that it was forked
    from."""

    def __init__(
        self, slots: AdapterSlots, take: Callable[[str], LoRAAdapter], num_rows: int
    ) -> None:
        """take: the adapter with a digest, once for each time that a plan loads it."""
        self._slots = slots
        self._take = take
        self._row_slots: Int32 = np.full(num_rows, NO_SLOT, np.int32)  # [R]
        self._set: Int32 = np.zeros(0, np.int32)  # [T], what was set last

    def change(self, plan: StepPlan) -> None:
        """Carry out the part of a plan that concerns adapters. No step that was executed before
        reads a slot any more, or the device carries them out in order."""
        row_slots = self._row_slots
        for admission in plan.admit:
            row_slots[admission.row] = admission.adapter_slot
        for fork in plan.forks:
            row_slots[fork.row] = row_slots[fork.source_row]
        for slot, digest in plan.adapter_loads:
            self._slots.load(slot, self._take(digest))
            self._set = self._set[:0]  # what was set may depend on what the slot has

    def set_rows(self, rows: Int64, num_new_tokens: Int64, num_tokens: int) -> None:
        """Before a forward pass of so many tokens, padding at the end included.

        rows: [S], in the order of their tokens. num_new_tokens: [S], how many of each.
        """
        wanted = np.full(num_tokens, NO_SLOT, np.int32)
        found = np.repeat(self._row_slots[rows], num_new_tokens)
        wanted[: len(found)] = found
        self._set_to(wanted)

    def set_base(self, num_tokens: int) -> None:
        """Before a forward pass of so many tokens that belong to no row."""
        self._set_to(np.full(num_tokens, NO_SLOT, np.int32))

    def _set_to(self, wanted: Int32) -> None:
        if not np.array_equal(wanted, self._set):
            self._slots.set_rows(torch.from_numpy(wanted))
            self._set = wanted
