"""Slots that hold the adapters of one linear: the interface, and its implementation in torch.

For each linear, one object holds the tensors of all resident adapters. Each adapter has a slot. The
addresses of a slot never change. Once per step, the slot of each row is set for all linears.

    h = round(scaling * (A x))         summed and scaled in fp32
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
    """The number of a model's slots, and the largest rank that fits in them."""

    #: Number of slots: the number of adapters that can be resident at a time.
    max_loras: int
    #: The largest rank of an adapter.
    max_rank: int


class LinearSlots(ABC):
    """The slots of one linear, attached to it."""

    @abstractmethod
    def load(self, slot: int, parts: PartWeights) -> None:
        """Replace the slot's content by an adapter's weights for each fused part (q, k, v) of the
        linear."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty the slot. From now on, this linear adds nothing to rows with this slot."""


class AdapterKernels(ABC):
    """Makes the slots of linears. Sets the slot of each row of a step, for all linears at once."""

    @abstractmethod
    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        """Number of bytes that `attach` would allocate, computed from the linear's sizes."""

    @abstractmethod
    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        """Attach empty slots to the linear. `dtype` is the model's dtype.

        If this linear shares a factor (A or B) that another linear stores, attach that linear
        first, and load the same adapters into both.
        """

    @abstractmethod
    def set_rows(self, row_slots: torch.Tensor) -> None:
        """Set the slot of each row, [T] int32, for the following steps; -1 means no adapter."""


def own_columns(linear: Linear) -> int:
    """The number of adapter weights that the linear stores per unit of rank, over all its parts.

    Factor A has one weight per input, and factor B one per output. A factor that another linear
    stores is not counted.
    """
    half = None if linear.shared_half is None else linear.shared_half.half
    inputs = 0 if half is AdapterHalf.A else len(linear.part_sizes) * linear.input_size
    return inputs + (0 if half is AdapterHalf.B else linear.output_size)


class TorchAdapterKernels(AdapterKernels):
    """Computes adapters with torch, slot by slot. Other kernels must give the same results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: list[tuple[int, torch.Tensor]] = []
        self._num_rows = 0

    @property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """The slots that the step uses, each with the indices of the rows that use it."""
        return self._groups

    @property
    def num_rows(self) -> int:
        """The number of rows T."""
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
    """A `layers.linear.LinearAdapter` in torch."""

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
        #: [S, R, I] for each part.
        self._a = [
            torch.zeros(num_slots, rank, linear.input_size, dtype=dtype, device=device)
            for _ in self._spans
        ]
        #: [S, O, R] for each part.
        self._b = [
            torch.zeros(num_slots, size, rank, dtype=dtype, device=device)
            for size in linear.part_sizes
        ]
        #: For each slot, the part, rank and scaling of the weights in it.
        self._used: list[list[tuple[int, int, float]]] = [[] for _ in range(num_slots)]

    def share(self, half: AdapterHalf, other: "TorchLinearSlots") -> None:
        """Use the other linear's tensors for the factor `half` (A or B)."""
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
        """Add the adapters' contributions for inputs x [T, I] to output [T, O], in place."""
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
