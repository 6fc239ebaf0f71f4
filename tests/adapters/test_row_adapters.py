"""Rows and the slots that they use, as plans say."""

import numpy as np
import torch

from quire.adapters.row_adapters import RowAdapters
from quire.core.sampling_params import DecodingParams
from quire.core.step import ItemLoad, RowAdmission, RowFork, StepPlan


class Slots:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def load(self, slot: int, adapter: object) -> None:
        self.calls.append((slot, adapter))

    def set_rows(self, row_slots: torch.Tensor) -> None:
        assert row_slots.dtype == torch.int32
        self.calls.append(row_slots.tolist())


def make() -> tuple[RowAdapters, Slots]:
    slots = Slots()
    return RowAdapters(slots, lambda digest: f"adapter {digest}", 4), slots  # type: ignore[arg-type]


def admission(row: int, slot: int) -> RowAdmission:
    return RowAdmission(row, [1], 1, 0, ((0,),), DecodingParams(1), adapter_slot=slot)


def set_rows(adapters: RowAdapters, rows: list[int], counts: list[int], num_tokens: int) -> None:
    adapters.set_rows(np.array(rows), np.array(counts), num_tokens)


def test_each_token_has_the_slot_of_its_row() -> None:
    adapters, slots = make()
    loads = (ItemLoad(1, "a"), ItemLoad(0, "b"))
    admitted = (admission(0, 1), admission(2, -1), admission(3, 0))
    adapters.change(StepPlan(0, 3, 6, admit=admitted, adapter_loads=loads))
    assert slots.calls == [(1, "adapter a"), (0, "adapter b")]
    set_rows(adapters, [2, 0, 3], [1, 3, 2], 8)
    assert slots.calls[-1] == [-1, 1, 1, 1, 0, 0, -1, -1], "padding has none"


def test_a_fork_has_its_source_s_slot_and_a_new_owner_its_own() -> None:
    adapters, slots = make()
    fork = RowFork(1, 0, DecodingParams(1), 1)
    adapters.change(StepPlan(0, 2, 2, admit=(admission(0, 2),), forks=(fork,)))
    set_rows(adapters, [0, 1], [1, 1], 2)
    adapters.change(StepPlan(1, 2, 2, release=(0,), admit=(admission(0, -1),)))
    set_rows(adapters, [0, 1], [1, 1], 2)
    assert slots.calls == [[2, 2], [-1, 2]]


def test_rows_are_set_again_only_after_a_slot_was_filled() -> None:
    adapters, slots = make()
    adapters.change(StepPlan(0, 1, 1, admit=(admission(0, 0),)))
    for _ in range(3):
        set_rows(adapters, [0], [1], 1)
    assert slots.calls == [[0]]
    adapters.change(StepPlan(1, 1, 1, adapter_loads=(ItemLoad(1, "a"),)))
    set_rows(adapters, [0], [1], 1)
    adapters.set_base(1)
    assert slots.calls == [[0], (1, "adapter a"), [0], [-1]]
