"""Tracks the adapter slot of each row of the runner, and loads adapters that plans request.

Called by `runtime.model_runner` around each forward pass. Rows and slots are indices here.

Shapes: R rows, S sequences of a step, T tokens of a step.
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
    """The adapter slots of the runner's rows.

    Invariant: a live row has the slot that it got when it was admitted, or the slot of the row from
    which it was forked.
    """

    def __init__(
        self, slots: AdapterSlots, take: Callable[[str], LoRAAdapter], num_rows: int
    ) -> None:
        """`take` returns the adapter with the given digest, and is called once for each load in a
        plan."""
        self._slots = slots
        self._take = take
        #: The slot of each row, [R].
        self._row_slots: Int32 = np.full(num_rows, NO_SLOT, np.int32)
        #: The slot of each token in the last forward pass, [T].
        self._set: Int32 = np.zeros(0, np.int32)

    def change(self, plan: StepPlan) -> None:
        """Execute the part of a plan that concerns adapters.

        This doesn't disturb earlier steps: they have ended, or the device executes loads after
        them.
        """
        row_slots = self._row_slots
        for admission in plan.admit:
            row_slots[admission.row] = admission.adapter_slot
        for fork in plan.forks:
            row_slots[fork.row] = row_slots[fork.source_row]
        for slot, digest in plan.adapter_loads:
            self._slots.load(slot, self._take(digest))
            # Make `_set_to` set the rows again, since kernels may have derived data from the slot.
            self._set = self._set[:0]

    def set_rows(self, rows: Int64, num_new_tokens: Int64, num_tokens: int) -> None:
        """Set the slots for a forward pass of `num_tokens`, including padding at the end.

        `rows` [S] are the rows in the order of their tokens. `num_new_tokens` [S] counts each row's
        tokens.
        """
        wanted = np.full(num_tokens, NO_SLOT, np.int32)
        found = np.repeat(self._row_slots[rows], num_new_tokens)
        wanted[: len(found)] = found
        self._set_to(wanted)

    def set_base(self, num_tokens: int) -> None:
        """Use no adapter in a forward pass of `num_tokens` tokens that belong to no row."""
        self._set_to(np.full(num_tokens, NO_SLOT, np.int32))

    def _set_to(self, wanted: Int32) -> None:
        if not np.array_equal(wanted, self._set):
            self._slots.set_rows(torch.from_numpy(wanted))
            self._set = wanted
