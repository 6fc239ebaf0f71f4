"""The fake runner's KV cache: a fingerprint in each slot.

A slot holds the fingerprint of the prefix that wrote it, salted by its KV group. Knows neither
plans nor rows beyond their numbers; used by `fake_runner` alone.
"""

import numpy as np
import numpy.typing as npt

from quire.core.step import BlockCopy
from quire.simulation.fake_model import mix
from quire.simulation.fake_rows import Ints, PlanHistory
from quire.simulation.fake_step import FakeStep

SCRIBBLE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
MAX_NUM_ROWS = 1 << 16  # rows are numbered below it, so that a writer is one number


class FakeStore:
    """Slots of all blocks, and which step and row wrote each last: step_id * MAX_NUM_ROWS + row."""

    def __init__(
        self,
        history: PlanHistory,
        windows: tuple[int | None, ...],
        num_blocks: int,
        block_size: int,
    ) -> None:
        """windows: of each KV group, how far back it is read; None: all the way."""
        self._history = history
        self._windows = windows
        self._block_size = block_size
        self._slots = np.full(num_blocks * block_size, SCRIBBLE, dtype=np.uint64)
        self._writer: Ints = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self._group_salts = [np.uint64(mix(group + 1)) for group in range(len(windows))]

    def scribble(self, blocks: list[int]) -> None:
        """Overwrite blocks whose content no sequence may still need."""
        self._slots.reshape(-1, self._block_size)[blocks] = SCRIBBLE

    def scribble_writes(self, step: FakeStep) -> None:
        """What a step leaves behind that dies in the middle."""
        for slots in step.write_slots:
            self._slots[slots] = SCRIBBLE

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Make the copies of a plan."""
        store = self._slots.reshape(-1, self._block_size)
        for copy in copies:
            store[copy.target] = store[copy.source]

    def write(self, step: FakeStep) -> None:
        """Write the tokens that a step computes; no slot may be written twice."""
        assert step.written is not None
        numbers = step.plan.step_id * MAX_NUM_ROWS + step.write_rows
        for slots, salt in zip(step.write_slots, self._group_salts, strict=True):
            self._slots[slots] = step.written ^ salt
            self._writer[slots] = numbers
        for slots in step.write_slots:
            twice = self._writer[slots] != numbers
            if twice.any():
                slot, row = int(slots[twice][0]), int(step.write_rows[twice][0])
                self._history.refuse(f"two rows wrote slot {slot} in step {step.plan.step_id}", row)

    def read_back(self, step: FakeStep) -> None:
        """Compare the whole context of each row, as its tables find it, with what it must be."""
        assert step.fingerprints is not None
        positions = np.arange(step.fingerprints.shape[1])
        in_context = positions < step.ends[:, None]
        for group, (slots, window) in enumerate(zip(step.read_slots, self._windows, strict=True)):
            read = self._slots[slots] ^ self._group_salts[group]
            wrong = (read != step.fingerprints) | (slots < 0)
            wrong &= in_context
            if window is not None:
                wrong &= positions > step.starts[:, None] - window
            if wrong.any():
                self._explain(step, group, wrong)

    def _explain(self, step: FakeStep, group: int, wrong: npt.NDArray[np.bool_]) -> None:
        index, position = (int(found[0]) for found in np.nonzero(wrong))
        row, slot = int(step.rows[index]), int(step.read_slots[group][index, position])
        wrote = "no row"
        if slot >= 0 and self._slots[slot] != SCRIBBLE:
            step_id, writer = divmod(int(self._writer[slot]), MAX_NUM_ROWS)
            wrote = f"row {writer} in step {step_id}"
        self._history.refuse(
            f"step {step.plan.step_id}: row {row} reads a wrong token {position} in group {group}"
            f" (block {slot // self._block_size}, slot {slot}); {wrote} wrote it last",
            row,
        )
