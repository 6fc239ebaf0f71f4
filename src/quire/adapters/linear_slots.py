"""What serves the adapters of a model's linears: the interface, and torch's.

One object for each linear holds the tensors of all resident adapters, each in its slot, at
addresses that never change. What a row of a step gets is said once a step for all linears.

    h = scaling * (A x)            summed in fp32, kept in fp32, rounded once by the scaling
    y = round(round(W x + b) + B h)    B h is summed in fp32; round is to y's dtype

where A and B are rounded to the model's dtype. A row without an adapter is not touched. Called by
`slots.py`.

Shapes: T rows of a step, S slots, R the largest rank, I inputs and O outputs of a linear.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.adapters.targets import PartWeights
from quire.layers.linear import AdapterHalf, Linear


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """max_loras: adapters that are resident at a time. max_rank: of each of them."""

    max_loras: int
    max_rank: int


class LinearSlots(ABC):
    """The slots of one linear, attached to it."""

    @abstractmethod
    def load(self, slot: int, parts: PartWeights) -> None:
        """Fill the slot, in place of what is in it. parts: of the linear."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """From now on rows of this slot get nothing here."""


class AdapterKernels(ABC):
    """Makes the slots of linears, and tells all of them what rows a step has."""

    @abstractmethod
    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        """What `attach` would take, by the linear's sizes alone."""

    @abstractmethod
    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        """Empty slots, in the linear's place for adapters. dtype: of the model. A linear whose half
        this one shares comes before, and is filled with the same adapters."""

    @abstractmethod
    def set_rows(self, row_slots: torch.Tensor) -> None:
        """row_slots [T] int32: the slot of each row of the steps to come; -1: none."""


def own_columns(linear: Linear) -> int:
    """Numbers that the linear itself keeps for each inner column: inputs of A, of all parts, and
    outputs of B."""
    half = None if linear.shared_half is None else linear.shared_half.half
    inputs = 0 if half is AdapterHalf.A else len(linear.part_sizes) * linear.input_size
    return inputs + (0 if half is AdapterHalf.B else linear.output_size)


class TorchAdapterKernels(AdapterKernels):
    """By torch, group after group; the definition of the others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: list[tuple[int, torch.Tensor]] = []
        self._num_rows = 0

    @property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """(slot, numbers of its rows) of all slots that the step uses."""
        return self._groups

    @property
    def num_rows(self) -> int:
        """T."""
        return self._num_rows

    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        return limits.max_loras * limits.max_rank * own_columns(linear) * dtype.itemsize

    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        slots = TorchLinearSlots(self, linear, limits, dtype, self._device)
        if linear.shared_half is not None:
            other = linear.shared_half.linear.adapter
            assert isinstance(other, TorchLinearSlots)
            slots.share(linear.shared_half.half, other)
        linear.adapter = slots
        return slots

    def set_rows(self, row_slots: torch.Tensor) -> None:
        self._num_rows = len(row_slots)
        found = sorted({*row_slots.tolist()} - {-1})
        self._groups = [
            (slot, (row_slots == slot).nonzero().flatten().to(self._device)) for slot in found
        ]


class TorchLinearSlots(LinearSlots):
    """A `layers.linear.LinearAdapter`. a: [S, R, I] for each part, b: [S, O, R]."""

    def __init__(
        self,
        step: TorchAdapterKernels,
        linear: Linear,
        limits: SlotLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._step = step
        num_slots, rank = limits.max_loras, limits.max_rank
        self._spans = [
            slice(linear.part_start(part), linear.part_start(part) + size)
            for part, size in enumerate(linear.part_sizes)
        ]
        self._a = [
            torch.zeros(num_slots, rank, linear.input_size, dtype=dtype, device=device)
            for _ in self._spans
        ]
        self._b = [
            torch.zeros(num_slots, size, rank, dtype=dtype, device=device)
            for size in linear.part_sizes
        ]
        self._used: list[list[tuple[int, int, float]]] = [[] for _ in range(num_slots)]

    def share(self, half: AdapterHalf, other: "TorchLinearSlots") -> None:
        """Let the other one keep this half."""
        if half is AdapterHalf.A:
            self._a = other._a
        else:
            self._b = other._b

    def load(self, slot: int, parts: PartWeights) -> None:
        self.clear(slot)
        used = []
        for part, weights in enumerate(parts):
            if weights is None:
                continue
            self._a[part][slot, : weights.rank].copy_(weights.a)
            self._b[part][slot, :, : weights.rank].copy_(weights.b)
            used.append((part, weights.rank, weights.scaling))
        self._used[slot] = used

    def clear(self, slot: int) -> None:
        self._used[slot] = []

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x [T, I], output [T, O], which is written to."""
        if not self._step.groups:
            return output
        assert len(x) == self._step.num_rows, "set_rows was called for another step"
        for slot, rows in self._step.groups:
            inputs = x[rows].float()
            for part, rank, scaling in self._used[slot]:
                span = self._spans[part]
                inner = inputs @ self._a[part][slot, :rank].float().T * scaling
                inner = inner.to(output.dtype).float()
                delta = inner @ self._b[part][slot, :, :rank].float().T
                output[rows, span] = (output[rows, span].float() + delta).to(output.dtype)
        return output
