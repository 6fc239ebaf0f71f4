"""Chooses the layers whose experts the CPU computes for a model on a GPU.

    cpu_experts=N       the last N layers that have experts
    cpu_experts="all"   all of them
    cpu_experts="auto"  as few as let the rest of the model fit on the GPU

"auto" is chosen before the weights are loaded, from their sizes and from the GPU's free memory, of
which shares are reserved for the KV cache and for the largest step. `device_memory_plan` then
measures the steps and says if too little was left. Called by `rank_build`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.assembly.device_memory_plan import DEFAULT_UTILIZATION
from quire.assembly.device_setup import DeviceSetup
from quire.core.memory.memory_report import format_bytes
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.options import FITTING_LAYERS
from quire.layers.experts import Experts
from quire.models.checkpoints.loader import module_bytes, served_blueprint, stored_bytes
from quire.models.config import ModelConfig
from quire.models.interface import TextModel
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes
from quire.options.engine_options import EngineOptions
from quire.runtime.device_memory import CudaMemory

KV_SHARE = 1 / 4
"""The share of the GPU's memory that "auto" leaves for the KV cache if no option gives its size."""

STEP_SHARE = 1 / 16
"""The share of the GPU's memory that "auto" leaves for a step's tensors, besides the logits."""

LOGITS_COPIES = 3
"""Tensors of the logits' size in fp32 that exist at once while tokens are chosen."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Where the weights of a model will be."""

    #: The setup, with the number of layers whose experts the CPU computes.
    setup: DeviceSetup
    #: Bytes of weights on the device.
    device_bytes: int
    #: Number of layers whose experts the CPU computes for another device.
    num_host_layers: int = 0
    #: Bytes of these experts, in the machine's memory.
    host_bytes: int = 0

    def facts(self) -> dict[str, int]:
        """The facts about experts on the host; empty if there are none."""
        if not self.num_host_layers:
            return {}
        return {"cpu_experts": self.num_host_layers, "host_weight_bytes": self.host_bytes}


def place_weights(
    options: EngineOptions, folder: Path, config: ModelConfig, setup: DeviceSetup
) -> PlacedWeights:
    """Choose the layers whose experts stay on the host, and count the bytes of all weights.

    Raises ConfigurationError for more layers than have experts, InsufficientMemoryError if the
    machine's memory is too small, and the errors of `served_blueprint`.
    """
    # First, choose the layers if the option says "auto".
    methods = setup.methods
    if methods.host is not None and options.cpu_experts == FITTING_LAYERS:
        whole = served_blueprint(folder, config, replace(methods, host=None))
        room = _room_bytes(options, config, CudaMemory(setup.device))
        sizes = [_bytes_of(experts, setup) for experts in _experts_of(whole)]
        num_layers = fewest_layers(stored_bytes(whole, config, setup.dtype), sizes, room)
        methods = methods.with_host(num_layers)
        setup = replace(setup, methods=methods)
    whole = served_blueprint(folder, config, methods)
    num_bytes = stored_bytes(whole, config, setup.dtype)
    if methods.host is None:
        return PlacedWeights(setup, num_bytes)
    # Then check the number of layers, and the machine's memory.
    layers = _experts_of(whole)
    placed = [experts for experts in layers if experts.is_on_host]
    is_number = isinstance(options.cpu_experts, int)
    if not layers or (is_number and methods.host.num_layers > len(layers)):
        raise ConfigurationError(
            f"cpu_experts is {options.cpu_experts!r}, but {len(layers)} layers of the model have"
            " experts that quire can leave to the CPU; lower it, or leave it out"
        )
    setup = replace(setup, methods=methods.with_host(len(placed)))
    host_bytes = sum(_bytes_of(experts, setup) for experts in placed)
    _check_host(host_bytes)
    logger.info(
        "the CPU computes the experts of the last %d of %d layers that have any: %s in the"
        " machine's memory; steps wait for them, so they are launched without CUDA graphs",
        len(placed),
        len(layers),
        format_bytes(host_bytes),
    )
    return PlacedWeights(setup, num_bytes - host_bytes, len(placed), host_bytes)


def fewest_layers(num_bytes: int, layer_bytes: Sequence[int], room_bytes: int) -> int:
    """The smallest number of last layers without whose experts `num_bytes` of weights fit into
    `room_bytes`; all layers if none suffices. `layer_bytes` has the bytes of each layer's
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
            f"the experts that cpu_experts leaves to the CPU take {format_bytes(host_bytes)}, but"
            f" the machine has {format_bytes(available)} available; lower cpu_experts, free memory,"
            " or choose a smaller model or a quantization"
        )


def _experts_of(whole: TextModel) -> list[Experts]:
    return [module for module in whole.modules() if isinstance(module, Experts)]


def _bytes_of(experts: Experts, setup: DeviceSetup) -> int:
    return sum(module_bytes(module, setup.dtype) for module in experts.modules())
