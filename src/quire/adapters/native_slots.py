"""Adapter slots for the native CPU kernels, which compute a linear and its adapters together.

Linears that torch multiplies get slots in torch. Made by the device's setup.
"""

from collections.abc import Sequence

import torch

from quire.adapters.linear_slots import (
    AdapterKernels,
    LinearSlots,
    SlotLimits,
    TorchAdapterKernels,
)
from quire.adapters.targets import PartWeights
from quire.formats.block_quantized.linear_methods import packed_parts
from quire.formats.packed import is_packed
from quire.formats.weight_format import LinearModule
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters, PackedRows, adapter_bytes
from quire.layers.linear import AdapterHalf, Linear, SharedHalf


class NativeAdapterKernels(AdapterKernels):
    """Attaches slots to linears, which then compute their adapters, too.

    Slots are attached before the model's program is recorded.
    """

    def __init__(self) -> None:
        self._rows = PackedRows()
        self._torch = TorchAdapterKernels(torch.device("cpu"))
        self._has_torch = False
        self._last: PackedAdapters | None = None

    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        """An upper bound of the bytes, since the weight format may pad each fused part (q, k, v)
        separately."""
        whole = _num_bytes(linear, linear.part_sizes, limits, dtype)
        return max(
            whole, sum(_num_bytes(linear, (size,), limits, dtype) for size in linear.part_sizes)
        )

    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        parts = packed_parts(linear)
        if parts:
            return _PartSlots([self._attach(part, limits, dtype) for part in parts])
        if is_packed(linear):
            slots = self._attach(linear, limits, dtype)
            if linear.shared_half is not None:
                _share(linear, linear.shared_half)
            return slots
        self._has_torch = True
        return self._torch.attach(linear, limits, dtype)

    def _attach(
        self, linear: LinearModule, limits: SlotLimits, dtype: torch.dtype
    ) -> "_PackedSlots":
        linear.packed_adapters = PackedAdapters(
            self._rows,
            linear.input_size,
            linear.part_sizes,
            is_interleaved=linear.gated,
            num_slots=limits.max_loras,
            max_rank=limits.max_rank,
            dtype=dtype,
        )
        if self._last is not None:
            self._last.followed_by(linear.packed_adapters)
        self._last = linear.packed_adapters
        return _PackedSlots(linear.packed_adapters)

    def set_rows(self, row_slots: torch.Tensor) -> None:
        self._rows.set(row_slots)
        if self._has_torch:
            self._torch.set_rows(row_slots)


def _num_bytes(
    linear: Linear, part_sizes: tuple[int, ...], limits: SlotLimits, dtype: torch.dtype
) -> int:
    half = None if linear.shared_half is None else linear.shared_half.half
    return adapter_bytes(
        linear.input_size,
        part_sizes,
        is_interleaved=linear.gated and len(part_sizes) > 1,
        num_slots=limits.max_loras,
        max_rank=limits.max_rank,
        dtype=dtype,
        has_a=half is not AdapterHalf.A,
        has_b=half is not AdapterHalf.B,
    )


def _share(linear: Linear, shared: SharedHalf) -> None:
    own, other = linear.packed_adapters, shared.linear.packed_adapters
    assert own is not None and other is not None
    if shared.half is AdapterHalf.A:
        own.share_a(other)
    else:
        own.share_b(other)


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


class _PartSlots(LinearSlots):
    """Slots of a linear whose parts are computed as separate products."""

    def __init__(self, slots: Sequence[LinearSlots]) -> None:
        self._slots = slots

    def load(self, slot: int, parts: PartWeights) -> None:
        for slots, part in zip(self._slots, parts, strict=True):
            slots.load(slot, (part,))

    def clear(self, slot: int) -> None:
        for slots in self._slots:
            slots.clear(slot)
