"""Adapter slots for Triton kernels, on a GPU or in Triton's interpreter.

Made by the device's setup. Imports Triton.
"""

from dataclasses import replace

import torch

from quire.adapters.linear_slots import AdapterKernels, LinearSlots, SlotLimits, own_columns
from quire.adapters.targets import PartWeights
from quire.kernels.triton.linear.adapter_matmul import (
    COLUMNS,
    AdapterTiles,
    add_adapters,
    make_weights,
)
from quire.layers.linear import AdapterHalf, Linear


class TritonAdapterKernels(AdapterKernels):
    """Attaches adapter slots to linears; Triton kernels compute the adapters.

    If no row of a step has an adapter, no kernel is launched. Steps that are captured as CUDA
    graphs always launch kernels, since graphs are replayed with and without adapters.
    """

    def __init__(self, device: torch.device, max_num_tokens: int, *, captures: bool) -> None:
        """A step has at most `max_num_tokens` tokens. `captures` says whether steps are captured as
        CUDA graphs."""
        self._device = device
        self._captures = captures
        self._max_num_tokens = max_num_tokens
        self._tiles: AdapterTiles | None = None

    def num_bytes(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> int:
        num_parts = len(linear.part_sizes)
        column_bytes = own_columns(linear) * dtype.itemsize
        return limits.max_loras * (_whole_columns(limits.max_rank) * column_bytes + 8 * num_parts)

    def attach(self, linear: Linear, limits: SlotLimits, dtype: torch.dtype) -> LinearSlots:
        if self._tiles is None:
            self._tiles = AdapterTiles(self._device, self._max_num_tokens, limits.max_loras)
        slots = _TritonLinearSlots(self._tiles, linear, limits, dtype, self._device)
        slots.always_launches = self._captures
        if linear.shared_half is not None:
            other = linear.shared_half.linear.adapter
            assert isinstance(other, _TritonLinearSlots)
            slots.share(linear.shared_half.half, other)
        linear.adapter = slots
        return slots

    def set_rows(self, row_slots: torch.Tensor) -> None:
        assert self._tiles is not None, "no linear has slots"
        self._tiles.set(row_slots)


class _TritonLinearSlots(LinearSlots):
    """The adapter slots of one linear, a `layers.linear.LinearAdapter` with Triton kernels."""

    #: Whether kernels are launched even if no row has an adapter.
    always_launches = False

    def __init__(
        self,
        tiles: AdapterTiles,
        linear: Linear,
        limits: SlotLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tiles = tiles
        self._rank = _whole_columns(limits.max_rank)
        self._spans = [
            slice(linear.part_start(part), linear.part_start(part) + size)
            for part, size in enumerate(linear.part_sizes)
        ]
        self._weights = make_weights(
            linear.input_size, linear.part_sizes, limits.max_loras, self._rank, dtype, device
        )

    def share(self, half: AdapterHalf, other: "_TritonLinearSlots") -> None:
        """Use the other linear's tensors for the factor `half` (A or B)."""
        if half is AdapterHalf.A:
            self._weights = replace(self._weights, a=other._weights.a)
        else:
            self._weights = replace(self._weights, b=other._weights.b)

    def load(self, slot: int, parts: PartWeights) -> None:
        weights = self._weights
        for part, given in enumerate(parts):
            if given is None:
                continue
            first = part * self._rank
            weights.a[slot, first : first + given.rank].copy_(given.a)
            weights.b[slot, self._spans[part], : given.rank].copy_(given.b)
        ranks = [0 if part is None else part.rank for part in parts]
        scales = [0.0 if part is None else part.scaling for part in parts]
        weights.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))
        weights.scales[slot].copy_(torch.tensor(scales))

    def clear(self, slot: int) -> None:
        self._weights.ranks[slot].zero_()

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add the adapters' contributions for x [..., inputs] to the contiguous output [...,
        outputs], in place."""
        if self._tiles.has_rows or self.always_launches:
            add_adapters(x, output, self._weights, self._tiles)
        return output


def _whole_columns(rank: int) -> int:
    return -(-rank // COLUMNS) * COLUMNS
