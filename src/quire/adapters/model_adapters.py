"""Makes the adapter slots of a model, and the store from which they are loaded.

Called by the composition root.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from quire.adapters.adapter import LoRAAdapter
from quire.adapters.linear_slots import AdapterKernels, SlotLimits
from quire.adapters.peft_folder import read_adapter
from quire.adapters.slots import AdapterSlots, slots_bytes
from quire.adapters.store import AdapterStore
from quire.core.adapter_options import AdapterOptions
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import blueprint
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.models.registry import find_entry


@dataclass(frozen=True, slots=True)
class ModelAdapters:
    """The adapters of one model."""

    #: The slots, attached to the model's linears.
    slots: AdapterSlots
    #: The store from which the slots are loaded.
    store: AdapterStore


def adapter_bytes(
    options: AdapterOptions,
    config: ModelConfig,
    methods: LinearMethods,
    kernels: AdapterKernels,
    dtype: torch.dtype,
) -> int:
    """Number of bytes of the slots, computed before the model is loaded; 0 if adapters are
    disabled.

    Raises ConfigurationError for a model that supports no adapters.
    """
    if not options.enable_lora:
        return 0
    whole = blueprint(config, find_entry(config), methods)
    return slots_bytes(whole, config, _limits(options), kernels, dtype)


def build_adapters(
    options: AdapterOptions,
    model: TextModel,
    config: ModelConfig,
    kernels: AdapterKernels,
    dtype: torch.dtype,
    *,
    encodes_images: bool,
) -> ModelAdapters | None:
    """The adapters of a loaded model, or None if the options disable them. `encodes_images`:
    refuse adapters of its encoder of images.

    Called before the model's forward pass is recorded. Raises ConfigurationError for a model that
    supports no adapters.
    """
    if not options.enable_lora:
        return None
    limits = _limits(options)
    slots = AdapterSlots(model, config, limits, kernels, dtype)

    def read(folder: Path) -> LoRAAdapter:
        adapter = read_adapter(folder, limits.max_rank, slots, encodes_images=encodes_images)
        slots.check(adapter)
        return adapter

    return ModelAdapters(slots, AdapterStore(read, options.num_cpu_loras))


def _limits(options: AdapterOptions) -> SlotLimits:
    return SlotLimits(options.num_lora_slots, options.lora_rank)
