"""The resident adapters of one model: slots that are filled, emptied, and given to rows.

Called by the runner, which says before each forward pass which slot each row uses.

    slots.check(adapter)          that it fits the model, before anything is changed
    slots.load(3, adapter)        into slot 3
    slots.set_rows(row_slots)     [T] int32; -1: the base model

A slot that rows of a step use is not to be loaded or cleared before the step has ended.

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
"""The largest that kernels are tested with."""


class AdapterSlots:
    """Slots for adapters on all linears of a model that may have them, empty at first.

    A linear that has them keeps them: there is one such object for a model. num_bytes: that all
    slots take, from the beginning on.
    """

    def __init__(
        self,
        model: TextModel,
        config: ModelConfig,
        limits: SlotLimits,
        kernels: AdapterKernels,
        dtype: torch.dtype,
    ) -> None:
        """model: loaded; config, dtype: of it. Raises ConfigurationError for a model that can have
        no adapters."""
        assert 1 <= limits.max_rank <= MAX_RANK and limits.max_loras >= 1
        self.limits = limits
        self._dtype = dtype
        self._targets = AdapterTargets(model, config)
        self._kernels = kernels
        self._linears: dict[str, LinearSlots] = {
            path: kernels.attach(linear, limits, dtype)
            for path, linear in self._targets.linears.items()
        }
        self.num_bytes = sum(
            kernels.num_bytes(linear, limits, dtype) for linear in self._targets.linears.values()
        )

    def uses(self, path: str) -> bool:
        """See `peft_folder.AdaptedModel`."""
        return self._targets.uses(path)

    def check_shapes(self, adapter: LoRAAdapter) -> None:
        """See `peft_folder.AdaptedModel`."""
        self._fitted(adapter)

    def check(self, adapter: LoRAAdapter) -> None:
        """Raises AdapterError where the model has no such linears, or they have other shapes, or a
        rank is above the limit, or numbers are too large for the model's dtype."""
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
        """Fill the slot, in place of what is in it. Raises what `check` raises, and changes
        nothing then."""
        assert 0 <= slot < self.limits.max_loras, slot
        found = self._fitted(adapter)
        for path, slots in self._linears.items():
            if path in found:
                slots.load(slot, found[path])
            else:
                slots.clear(slot)

    def clear(self, slot: int) -> None:
        """Rows of this slot get nothing, as those of the base model."""
        for slots in self._linears.values():
            slots.clear(slot)

    def set_rows(self, row_slots: torch.Tensor) -> None:
        """row_slots [T] int32, on the CPU: of the rows of the next forward pass."""
        self._kernels.set_rows(row_slots)


def _stays_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its numbers, which are finite, are so in this dtype, too."""
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
    """`AdapterSlots.num_bytes`, before the model is there. whole: its blueprint."""
    linears = AdapterTargets(whole, config).linears.values()
    return sum(kernels.num_bytes(linear, limits, dtype) for linear in linears)
