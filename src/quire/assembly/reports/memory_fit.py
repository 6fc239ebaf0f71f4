"""Computes the memory that an engine with given options would take, without building it.

Uses the code that sizes an engine when it is built, so an engine would report the same sizes.
Called by `planning`.
"""

from dataclasses import dataclass

from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup, device_name
from quire.assembly.host_memory_plan import plan_memory, wanted_model_len
from quire.assembly.host_part import place_weights
from quire.assembly.model_kind import ModelKind, choose_kind
from quire.assembly.rank_build import choose_part_of_host
from quire.assembly.vision_build import plan_vision
from quire.core.kv_groups import KVGroup
from quire.core.memory.growth import Growth
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout, plan_layout


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The sizes of an engine, and its dtypes, kernels and device."""

    #: Bytes of all weights.
    weight_bytes: int
    groups: tuple[KVGroup, ...]
    bytes_per_block: int
    #: Blocks of the KV pool.
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    #: `KVFormat.name` of the KV cache.
    kv_format: str
    #: The kernels' name, as in `DeviceSetup.name`.
    kernels: str
    num_threads: int
    #: The kind of device in torch's words, such as "cpu" or "cuda".
    device_type: str
    #: The device's name, as `device_name` returns it.
    device: str
    #: Whether the model takes images, and one step computes all tokens of an image.
    reads_contents_whole: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV pool."""
        return self.num_blocks * self.bytes_per_block

    def num_sequences(self, num_tokens: int) -> int:
        """The number of sequences of `num_tokens` tokens that fit into the pool together."""
        return self.num_blocks // Growth(self.groups, self.block_size).most_to_hold(num_tokens)


def choose_model(options: EngineOptions) -> ModelKind:
    """The model that the options name. Raises ConfigurationError if it does not generate text."""
    kind = choose_kind(options)
    if not kind.generates:
        raise ConfigurationError(
            f"{kind.config.architecture} embeds or scores here, but plans are made for models that"
            " generate text"
        )
    return kind


def fit_memory(options: EngineOptions, kind: ModelKind) -> MemoryFit:
    """The sizes of an engine with `options`, which name the model of `kind`.

    Raises ConfigurationError and InsufficientMemoryError if this machine can't serve the model with
    these options.
    """
    config = kind.config
    device = choose_device(options.device)
    binding = None
    if options.tensor_parallel_size == 1:
        binding = choose_part_of_host(options, device)
    num_threads = options.num_threads if binding is None else binding.num_threads
    setup = choose_setup(options, config, device, num_threads)
    placed = place_weights(options, kind.folder, config, setup)
    setup = placed.setup
    layout = _layout(options, kind, setup)
    if setup.device.type != "cpu":
        return _on_device(options, kind, setup, layout, placed.device_bytes)
    num_bytes = placed.device_bytes + placed.host_bytes
    most_bytes = None if binding is None else binding.free_bytes
    num_taken_bytes = num_bytes + plan_vision(options, kind.tower, setup).total_bytes
    plan = plan_memory(options, config, layout, num_taken_bytes, most_bytes=most_bytes)
    return _fit(options, kind, setup, layout, num_bytes, (plan.num_blocks, plan.max_model_len))


def _on_device(
    options: EngineOptions,
    kind: ModelKind,
    setup: DeviceSetup,
    layout: KVCacheLayout,
    num_bytes: int,
) -> MemoryFit:
    """The sizes on a GPU. Raises ConfigurationError unless an option gives the size of the KV
    cache, since only measured steps tell how much memory is left for it."""
    if options.num_blocks is not None:
        num_blocks = options.num_blocks
    elif options.kv_cache_bytes is not None:
        num_blocks = options.kv_cache_bytes // layout.bytes_per_block
    else:
        raise ConfigurationError(
            "the number of KV blocks that fit on a GPU is measured only when an engine starts"
            " there; give kv_cache_memory, or the num_blocks that an engine logged at its start"
        )
    model_len = wanted_model_len(options, kind.config)
    return _fit(options, kind, setup, layout, num_bytes, (num_blocks, model_len))


def _layout(options: EngineOptions, kind: ModelKind, setup: DeviceSetup) -> KVCacheLayout:
    pages, host_layers = setup.page_sides()
    return plan_layout(
        kind.config.attention_specs,
        pages,
        options.block_size,
        setup.kv_format,
        recurrent_specs=kind.config.recurrent_specs,
        typical_tokens=max(1, wanted_model_len(options, kind.config) // 2),
        host=host_layers,
    )


def _fit(
    options: EngineOptions,
    kind: ModelKind,
    setup: DeviceSetup,
    layout: KVCacheLayout,
    num_bytes: int,
    sizes: tuple[int, int],
) -> MemoryFit:
    return MemoryFit(
        weight_bytes=num_bytes,
        groups=layout.groups,
        bytes_per_block=layout.bytes_per_block,
        num_blocks=sizes[0],
        block_size=options.block_size,
        max_model_len=sizes[1],
        dtype=str(setup.dtype).removeprefix("torch."),
        kv_format=setup.kv_format.name,
        kernels=setup.name,
        num_threads=setup.num_threads,
        device_type=setup.device.type,
        device=device_name(setup.device),
        reads_contents_whole=kind.tower is not None and kind.config.reads_contents_whole,
    )
