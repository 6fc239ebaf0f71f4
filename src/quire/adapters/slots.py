"""The adapters of one model on its device, in slots that rows of a step use.

Called by the runner, which sets the slot of each row before each forward pass.

    slots.check(adapter)          checks that the adapter fits the model
    slots.load(3, adapter)        loads it into slot 3
    slots.set_rows(row_slots)     sets the slots [T] int32 of rows; -1 is the base model

A slot that rows of a step use must not be loaded or cleared before the step has ended.

Shapes: T rows of a step.
"""

import torch

from quire.adapters.adapter import LoRAAdapter
from quire.adapters.linear_slots import AdapterKernels, LinearSlots, SlotLimits
from quire.adapters.targets import AdapterTargets, PartWeights
from quire.errors import AdapterError
from quire.hub.model_files import shown_name
from quire.models.config import ModelConfig
from quire.models.interface import TextModel

MAX_RANK = 256
"""The largest rank that max_lora_rank may have, since kernels are tested up to it."""


class AdapterSlots:
    """The slots of all linears of a model that support adapters, empty at first.

    Slots can't be detached from linears, so a model has only one such object.
    """

    def __init__(
        self,
        model: TextModel,
        config: ModelConfig,
        limits: SlotLimits,
        kernels: AdapterKernels,
        dtype: torch.dtype,
    ) -> None:
        """`model` must be loaded. Raises ConfigurationError if it supports no adapters."""
        assert 1 <= limits.max_rank <= MAX_RANK and limits.max_loras >= 1
        self.limits = limits
        self._dtype = dtype
        self._targets = AdapterTargets(model, config)
        self._kernels = kernels
        self._linears: dict[str, LinearSlots] = {
            path: kernels.attach(linear, limits, dtype)
            for path, linear in self._targets.linears.items()
        }
        #: Number of bytes of all slots, which are allocated at once.
        self.num_bytes = sum(
            kernels.num_bytes(linear, limits, dtype) for linear in self._targets.linears.values()
        )

    def uses(self, path: str) -> bool:
        """See `AdapterTargets.uses`."""
        return self._targets.uses(path)

    def check_shapes(self, adapter: LoRAAdapter) -> None:
        """Raises AdapterError if the model lacks linears of the adapter, or has them in other
        shapes.

        Only the shapes of the adapter's tensors are read.
        """
        self._fitted(adapter)

    def check(self, adapter: LoRAAdapter) -> None:
        """Raises AdapterError if the adapter doesn't fit the model.

        Reasons are linears that the model lacks or has in other shapes, a rank above the limit, and
        numbers too large for the model's dtype.
        """
        self._fitted(adapter)
        for path, weights in adapter.weights.items():
            tensors_fit = _stays_finite(weights.a, self._dtype) and _stays_finite(
                weights.b, self._dtype
            )
            if not tensors_fit or abs(weights.scaling) > torch.finfo(torch.float32).max:
                raise AdapterError(
                    f"adapter {adapter.name}: {shown_name(path)} has numbers, or a scaling, that "
                    f"are infinite in {str(self._dtype).removeprefix('torch.')}"
                )

    def _fitted(self, adapter: LoRAAdapter) -> dict[str, PartWeights]:
        for path, weights in adapter.weights.items():
            if weights.rank > self.limits.max_rank:
                raise AdapterError(
                    f"adapter {adapter.name}: {shown_name(path)} has rank {weights.rank}, above "
                    f"max_lora_rank, {self.limits.max_rank}; raise that option"
                )
        return self._targets.resolve(adapter)

    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Replace the slot's content by the adapter. If it doesn't fit, raises AdapterError and
        changes nothing."""
        assert 0 <= slot < self.limits.max_loras, slot
        found = self._fitted(adapter)
        for path, slots in self._linears.items():
            if path in found:
                slots.load(slot, found[path])
            else:
                slots.clear(slot)

    def clear(self, slot: int) -> None:
        """Empty the slot. From now on, rows with this slot compute the base model."""
        for slots in self._linears.values():
            slots.clear(slot)

    def set_rows(self, row_slots: torch.Tensor) -> None:
        """Set the slots of the next forward pass's rows: [T] int32, on the CPU."""
        self._kernels.set_rows(row_slots)


def _stays_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's finite numbers remain finite in `dtype`."""
    if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return True
    return bool(tensor.to(dtype).isfinite().all())


def slots_bytes(
    whole: TextModel,
    config: ModelConfig,
    limits: SlotLimits,
    kernels: AdapterKernels,
    dtype: torch.dtype,
) -> int:
    """Predicts `AdapterSlots.num_bytes` before the model is loaded, from its blueprint `whole`."""
    linears = AdapterTargets(whole, config).linears.values()
    return sum(kernels.num_bytes(linear, limits, dtype) for linear in linears)
