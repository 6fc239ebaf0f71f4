"""Chooses the layers or experts that the CPU computes for a model on a GPU.

    cpu_layers=N         the last N layers, with their part of the KV cache
    cpu_experts=N        the experts of the last N layers that have any
    cpu_experts="all"    the experts of all layers
    "auto"               as few of either as let the rest of the model fit on the GPU

"auto" is chosen before the weights are loaded, from their sizes and from the GPU's free memory, of
which shares are reserved for the KV cache and for the largest step. `device_memory_plan` then
measures the steps and says if too little was left. Called by `rank_build`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from quire.assembly.device_memory_plan import DEFAULT_UTILIZATION
from quire.assembly.device_setup import DeviceSetup
from quire.core.memory.memory_report import format_bytes
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.options import FITTING_LAYERS
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models.checkpoints.loader import module_bytes, served_blueprint, stored_bytes
from quire.models.config import ModelConfig
from quire.models.decoder import HeadlessDecoder
from quire.models.interface import TextModel
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes
from quire.options.engine_options import EngineOptions
from quire.runtime.device_memory import CudaMemory
from quire.runtime.page_layout import KVCacheLayout

KV_SHARE = 1 / 4
"""The share of the GPU's memory that "auto" leaves for the KV cache if no option gives its size."""

STEP_SHARE = 1 / 16
"""The share of the GPU's memory that "auto" leaves for a step's tensors, besides the logits."""

LOGITS_COPIES = 3
"""Tensors of the logits' size in fp32 that exist at once while tokens are chosen."""

HOST_KV_SHARE = 0.9
"""The share of the machine's free memory that the KV cache of layers on the CPU may take."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Where the weights of a model will be."""

    #: The setup, with the number of layers whose experts the CPU computes.
    setup: DeviceSetup
    #: Bytes of weights on the device.
    device_bytes: int
    #: Number of layers that the CPU computes for another device, wholly or their experts.
    num_host_layers: int = 0
    #: Bytes of their weights in the machine's memory.
    host_bytes: int = 0

    def facts(self) -> dict[str, int]:
        """The facts about the part on the host; empty if there is none."""
        host = self.setup.methods.host
        if host is None:
            return {}
        name = "cpu_experts" if host.has_experts_only else "cpu_layers"
        return {name: self.num_host_layers, "host_weight_bytes": self.host_bytes}


def place_weights(
    options: EngineOptions, folder: Path, config: ModelConfig, setup: DeviceSetup
) -> PlacedWeights:
    """Choose the part of the model that the CPU computes, and count the bytes of all weights.

    Raises ConfigurationError for more layers than have experts, InsufficientMemoryError if the
    machine's memory is too small, and the errors of `served_blueprint`.
    """
    # First, choose the layers if the option says "auto".
    methods = setup.methods
    _, wanted = options.host_part or ("", None)
    if methods.host is not None and wanted == FITTING_LAYERS:
        whole = served_blueprint(folder, config, replace(methods, host=None))
        room = _room_bytes(options, config, CudaMemory(setup.device))
        parts = _parts_of(whole, methods.host.has_experts_only)
        sizes = [_bytes_of(part, setup) for part in parts]
        num_layers = fewest_layers(stored_bytes(whole, config, setup.dtype), sizes, room)
        methods = methods.with_host(num_layers)
        setup = replace(setup, methods=methods)
    whole = served_blueprint(folder, config, methods)
    num_bytes = stored_bytes(whole, config, setup.dtype)
    host = methods.host
    if host is None:
        return PlacedWeights(setup, num_bytes)
    # Then check the number of layers, and the machine's memory.
    layers = _parts_of(whole, host.has_experts_only)
    placed = [part for part in layers if _is_on_host(part)]
    is_number = isinstance(wanted, int)
    if not layers or (is_number and host.num_layers > len(layers)):
        raise ConfigurationError(
            f"cpu_experts is {wanted!r}, but {len(layers)} layers of the model have experts that"
            " quire can leave to the CPU; lower it, or leave it out"
        )
    setup = replace(setup, methods=methods.with_host(len(placed)))
    host_bytes = sum(_bytes_of(part, setup) for part in placed)
    _check_host(host_bytes)
    logger.info(
        "the CPU computes %s the last %d of %d layers: %s of weights in the machine's memory; steps"
        " wait for it, so they are launched without CUDA graphs",
        "the experts of" if host.has_experts_only else "all of",
        len(placed),
        len(layers),
        format_bytes(host_bytes),
    )
    return PlacedWeights(setup, num_bytes - host_bytes, len(placed), host_bytes)


def fewest_layers(num_bytes: int, layer_bytes: Sequence[int], room_bytes: int) -> int:
    """The smallest number of last layers without which `num_bytes` of weights fit into
    `room_bytes`; all layers if none suffices. `layer_bytes` has the bytes of each layer, or of its
    experts."""
    num_layers = 0
    while num_bytes > room_bytes and num_layers < len(layer_bytes):
        num_layers += 1
        num_bytes -= layer_bytes[-num_layers]
    return num_layers


def _room_bytes(options: EngineOptions, config: ModelConfig, memory: CudaMemory) -> int:
    """The GPU's memory that "auto" gives to weights."""
    total = memory.total_bytes
    usable = int(total * (options.gpu_memory_utilization or DEFAULT_UTILIZATION))
    kv_bytes = options.kv_cache_bytes or int(total * KV_SHARE)
    logits_bytes = LOGITS_COPIES * 4 * options.max_num_seqs * config.vocab_size
    taken = total - memory.free_bytes()
    return usable - taken - kv_bytes - logits_bytes - int(total * STEP_SHARE)


def _check_host(host_bytes: int) -> None:
    available = available_memory_bytes()
    if host_bytes > available:
        raise InsufficientMemoryError(
            f"the weights that are left to the CPU take {format_bytes(host_bytes)}, but the machine"
            f" has {format_bytes(available)} available; lower cpu_layers or cpu_experts, free"
            " memory, or choose a smaller model or a quantization"
        )


def host_blocks(options: EngineOptions, layout: KVCacheLayout, num_blocks: int) -> int:
    """The most KV blocks, up to num_blocks, whose host part fits into the machine's memory. The
    weights must be loaded already. Raises InsufficientMemoryError if fewer fit than the options ask
    for."""
    room, page = int(available_memory_bytes() * HOST_KV_SHARE), layout.host_bytes_per_block
    if num_blocks * page <= room:
        return num_blocks
    most = room // page
    if options.num_blocks is not None or options.kv_cache_bytes is not None:
        raise InsufficientMemoryError(
            f"{num_blocks} KV blocks were asked for, and their layers on the CPU take"
            f" {format_bytes(num_blocks * page)}, but there is room for {format_bytes(room)};"
            f" lower num_blocks or kv_cache_memory to at most {most} blocks"
            f" ({most * layout.bytes_per_block} bytes), or lower cpu_layers"
        )
    return most


def _parts_of(whole: TextModel, has_experts_only: bool) -> list[nn.Module]:
    """The parts that the CPU may compute, from the last one on: layers, or each layer's experts."""
    if has_experts_only:
        return [module for module in whole.modules() if isinstance(module, Experts)]
    return [*whole.model.layers] if isinstance(whole, HeadlessDecoder) else []


def _is_on_host(part: nn.Module) -> bool:
    """Whether the CPU computes all of it. A layer whose experts alone are on the host is not."""
    linears = [each for each in part.modules() if isinstance(each, Linear)]
    return bool(linears) and all(each.is_on_host for each in linears)


def _bytes_of(part: nn.Module, setup: DeviceSetup) -> int:
    return sum(module_bytes(module, setup.dtype) for module in part.modules())
