"""Slots of adapters that the native kernels of the CPU read, with the linear itself.

Linears that a weight format leaves to torch have torch's slots. Called by whoever makes
`slots.AdapterSlots`.
"""

import torch

from quire.adapters.linear_slots import (
    AdapterKernels,
    LinearSlots,
    SlotLimits,
    TorchAdapterKernels,
)
from quire.adapters.targets import PartWeights
from quire.formats.packed import is_packed
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters, PackedRows, adapter_bytes
from quire.layers.linear import Linear


class NativeAdapterKernels(AdapterKernels):
    """To be attached before a program is recorded of the model: its linears then compute both."""

    def __init__(self) -> None:
        self._rows = PackedRows()
        self._torch = TorchAdapterKernels(torch.device("cpu"))
        self._has_torch = False

    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        return adapter_bytes(
            linear.input_size,
            linear.part_sizes,
            is_interleaved=linear.gated,
            num_slots=limits.max_loras,
            max_rank=limits.max_rank,
            dtype=dtype,
        )

    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        if not is_packed(linear):
            self._has_torch = True
            return self._torch.attach(linear, limits, dtype)
        linear.packed_adapters = PackedAdapters(
            self._rows,
            linear.input_size,
            linear.part_sizes,
            is_interleaved=linear.gated,
            num_slots=limits.max_loras,
            max_rank=limits.max_rank,
            dtype=dtype,
        )
        return _PackedSlots(linear.packed_adapters)

    def set_rows(self, row_slots: torch.Tensor) -> None:
        self._rows.set(row_slots)
        if self._has_torch:
            self._torch.set_rows(row_slots)


class _PackedSlots(LinearSlots):
    def __init__(self, adapters: PackedAdapters) -> None:
        self._adapters = adapters

    def load(self, slot: int, parts: PartWeights) -> None:
        self._adapters.load(
            slot,
            [None if part is None else (part.a, part.b, part.scaling) for part in parts],
        )

    def clear(self, slot: int) -> None:
        self._adapters.clear(slot)
