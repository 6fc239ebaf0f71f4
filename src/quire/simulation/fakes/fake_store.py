"""The fake runner's KV cache, with a fingerprint of the prefix in each slot.

A slot contains the fingerprint of the prefix that wrote it, salted by its KV group. A page of a
recurrent state contains the number of tokens that the state summarizes and their fingerprint,
salted by the page's index in the state. Only `fake_runner` uses it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.step import BlockCopy
from quire.simulation.fakes.fake_model import Fingerprints, mix
from quire.simulation.fakes.fake_step import FakeStep, Ints, RowStep
from quire.simulation.plan_rows import PlanHistory


class BlockBytes(NamedTuple):
    """The whole content of a block."""

    slots: npt.NDArray[np.uint64]
    writer: Ints
    num_state_tokens: int


SCRIBBLE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
MAX_NUM_ROWS = 1 << 16  # row numbers are lower, so that step and row fit into one number


class FakeStore:
    """The slots of all blocks, and their last writers as step_id * MAX_NUM_ROWS + row.

    All slots of a state's page have the same fingerprint. The number of tokens that the state
    summarizes is stored for the page's block.
    """

    def __init__(
        self, history: PlanHistory, num_groups: int, num_blocks: int, block_size: int
    ) -> None:
        self._history = history
        self._block_size = block_size
        self._slots = np.full(num_blocks * block_size, SCRIBBLE, dtype=np.uint64)
        self._writer: Ints = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self._num_state_tokens: Ints = np.full(num_blocks, -1, dtype=np.int64)
        salts = [mix(group + 1) for group in range(num_groups)]
        self._group_salts: Fingerprints = np.array(salts, dtype=np.uint64)

    def scribble(self, blocks: list[int]) -> None:
        """Overwrite blocks whose content is no longer needed if scheduler and memory are right."""
        self._slots.reshape(-1, self._block_size)[blocks] = SCRIBBLE
        self._num_state_tokens[blocks] = -1

    def scribble_writes(self, step: FakeStep) -> None:
        """Overwrite all slots and blocks that a failed step would have written, since it may have
        written some."""
        self.scribble([copy.target for copy in step.copies])
        for each in step.rows:
            for group in each.slots:
                self._slots[each.written_slots(group)] = SCRIBBLE
            for pages in each.pages.values():
                self.scribble(pages.tolist())

    def read_block(self, block: int) -> BlockBytes:
        """The content of a block, which a tier stores."""
        slots = self._slots.reshape(-1, self._block_size)[block].copy()
        writer = self._writer.reshape(-1, self._block_size)[block].copy()
        return BlockBytes(slots, writer, int(self._num_state_tokens[block]))

    def write_block(self, block: int, found: BlockBytes) -> None:
        """Fill a block with the content that a tier loaded."""
        self._slots.reshape(-1, self._block_size)[block] = found.slots
        self._writer.reshape(-1, self._block_size)[block] = found.writer
        self._num_state_tokens[block] = found.num_state_tokens

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Make the copies of a plan."""
        store = self._slots.reshape(-1, self._block_size)
        writer = self._writer.reshape(-1, self._block_size)
        for copy in copies:
            store[copy.target] = store[copy.source]
            writer[copy.target] = writer[copy.source]
            self._num_state_tokens[copy.target] = self._num_state_tokens[copy.source]

    def write(self, step: FakeStep) -> None:
        """Write the tokens that a step computes; no slot may be written twice."""
        accesses = [(each, group) for each in step.rows for group in each.slots]
        if not accesses:
            return
        # The arrays of all rows are joined, since a simulation has many rows of few slots.
        counts = [each.end - each.start for each, _ in accesses]
        slots = np.concatenate([each.written_slots(group) for each, group in accesses])
        computed = np.concatenate(
            [each.fingerprints[each.start : each.end] for each, _ in accesses]
        )
        first_writer = step.step_id * MAX_NUM_ROWS
        writers = np.repeat([first_writer + each.row.number for each, _ in accesses], counts)
        self._slots[slots] = computed ^ self._salts(accesses, counts)
        self._writer[slots] = writers
        self._num_state_tokens[slots // self._block_size] = -1
        twice = self._writer[slots] != writers
        if twice.any():
            at = int(np.argmax(twice))
            self._history.refuse(
                f"two rows wrote slot {slots[at]} in step {step.step_id}",
                int(writers[at]) - first_writer,
            )

    def read_back(self, step: FakeStep) -> None:
        """Read the whole context of each row through its tables, and compare its fingerprints."""
        accesses = [(each, group) for each in step.rows for group in each.slots]
        if not accesses:
            return
        of_access = [each.slots[group] for each, group in accesses]
        counts = [len(slots) for slots in of_access]
        slots = np.concatenate(of_access)
        expected = np.concatenate(
            [
                each.fingerprints[each.end - count : each.end]
                for (each, _), count in zip(accesses, counts, strict=True)
            ]
        )
        wrong = (self._slots[slots] ^ self._salts(accesses, counts)) != expected
        wrong |= slots < 0
        if wrong.any():
            at, ends = int(np.argmax(wrong)), np.cumsum(counts)
            index = int(np.searchsorted(ends, at, side="right"))
            each, group = accesses[index]
            self._explain(step, each, group, at - int(ends[index]) + counts[index])

    def _salts(self, accesses: list[tuple[RowStep, int]], counts: list[int]) -> Fingerprints:
        """The salt of each slot's group, for accesses (row, group) with these numbers of slots."""
        return np.repeat(self._group_salts[[group for _, group in accesses]], counts)

    def advance_states(self, step: FakeStep) -> None:
        """Check and replace the states of all rows, in place.

        A row reads the state after its previously computed tokens, if any, and writes the state
        after the tokens of this step, without its drafts.
        """
        store = self._slots.reshape(-1, self._block_size)
        writer = self._writer.reshape(-1, self._block_size)
        for each in step.rows:
            for group, pages in each.pages.items():
                salts = self._page_salts(group, len(pages))
                if each.start:
                    before = each.fingerprints[each.start - 1] ^ salts
                    wrong = (store[pages] != before[:, None]).any(axis=1)
                    wrong |= self._num_state_tokens[pages] != each.start
                    if wrong.any():
                        self._explain_state(step, each, group, int(np.argmax(wrong)))
                store[pages] = (each.fingerprints[each.num_tokens - 1] ^ salts)[:, None]
                self._num_state_tokens[pages] = each.num_tokens
                writer[pages] = step.step_id * MAX_NUM_ROWS + each.row.number

    def _page_salts(self, group: int, count: int) -> npt.NDArray[np.uint64]:
        salt = int(self._group_salts[group])
        return np.array([mix(salt + index + 1) for index in range(count)], dtype=np.uint64)

    def _explain_state(self, step: FakeStep, each: RowStep, group: int, place: int) -> None:
        row, page = each.row.number, int(each.pages[group][place])
        count, holds = int(self._num_state_tokens[page]), "no state"
        if count >= 0:
            step_id, writer = divmod(int(self._writer[page * self._block_size]), MAX_NUM_ROWS)
            holds = f"a state after {count} tokens, of row {writer} in step {step_id}"
        self._history.refuse(
            f"step {step.step_id}: row {row} goes on from a wrong state in group {group}, page"
            f" {place} (block {page}): it has {each.start} tokens, the page holds {holds}",
            row,
        )

    def _explain(self, step: FakeStep, each: RowStep, group: int, place: int) -> None:
        slots, row = each.slots[group], each.row.number
        slot, position = int(slots[place]), each.end - len(slots) + place
        wrote = "no row"
        if slot >= 0 and self._slots[slot] != SCRIBBLE:
            step_id, writer = divmod(int(self._writer[slot]), MAX_NUM_ROWS)
            wrote = f"row {writer} in step {step_id}"
        self._history.refuse(
            f"step {step.step_id}: row {row} reads a wrong token {position} in group {group}"
            f" (block {slot // self._block_size}, slot {slot}); {wrote} wrote it last",
            row,
        )
