"""Chooses the number of KV blocks on the CPU, and the length of the longest sequence.

`options.engine_options.SizeOptions` explains the rules. The operating system says how much memory
is available; the caller, `rank_build`, passes the sizes of weights and blocks. On a GPU
`device_memory_plan` measures instead. Only computes sizes: uses no tensors and builds nothing.
"""

from dataclasses import dataclass

from quire.core.memory.growth import Growth
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.models.config import ModelConfig
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes, total_memory_bytes
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout

# If no option gives a size, the KV cache takes at most this share of the free memory.
DEFAULT_FREE_SHARE = 0.3

LEAST_TABLE_BYTES, TABLE_FREE_SHARE = 64 << 20, 1 / 256
"""If no option gives a length, the table of rotary embeddings takes at most the larger of this size
and this share of free memory. With 28 layers of 4 KV heads, K and V are 112 times as large as the
table."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of the KV memory."""

    #: KV blocks in the pool.
    num_blocks: int
    #: Tokens of the longest sequence.
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """Memory that is not available to the KV cache."""

    weight_bytes: int
    adapter_bytes: int
    #: Maximum memory of this engine, including weights, if no option gives a size; None means no
    #: limit.
    most_bytes: int | None


def plan_memory(
    options: EngineOptions,
    config: ModelConfig,
    layout: KVCacheLayout,
    weight_bytes: int,
    adapter_bytes: int = 0,
    most_bytes: int | None = None,
) -> MemoryPlan:
    """Choose sizes of the KV memory that fit into the machine's memory.

    `adapter_bytes` is the size of the slots for adapters. `most_bytes` is this engine's share of
    the free memory of the NUMA nodes that the ranks are bound to; None if they are not bound.
    Raises ConfigurationError and InsufficientMemoryError.
    """
    wanted_len = wanted_model_len(options, config)
    if options.max_model_len is None:
        wanted_len = _with_small_table(wanted_len, config)
    taken = _Taken(weight_bytes, adapter_bytes, most_bytes)
    num_blocks = _choose_num_blocks(options, layout, wanted_len, taken, config.is_causal)
    fitting_len = fitting_tokens(num_blocks, wanted_len, options, layout)
    if fitting_len >= wanted_len:
        return MemoryPlan(num_blocks, wanted_len)
    there = (
        f"{num_blocks} KV blocks of {layout.bytes_per_block} bytes hold {fitting_len} tokens"
        f" of one sequence"
    )
    if options.max_model_len is not None or fitting_len < 2:
        raise InsufficientMemoryError(
            f"{there}, but max_model_len is {wanted_len}; raise kv_cache_memory (or num_blocks) to"
            f" {blocks_for(wanted_len, options, layout) * layout.bytes_per_block} bytes or more,"
            " or lower max_model_len"
        )
    logger.warning("%s, so max_model_len is %d instead of %d", there, fitting_len, wanted_len)
    return MemoryPlan(num_blocks, fitting_len)


def wanted_model_len(options: EngineOptions, config: ModelConfig) -> int:
    """The options' max_model_len, or else the longest length in the model's config.

    Raises ConfigurationError if the model does not support the length.
    """
    longest = config.max_supported_positions
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ConfigurationError(
            f"max_model_len is {options.max_model_len}, but the model was made for at most"
            f" {longest} positions (max_position_embeddings in its config.json is"
            f" {config.max_position_embeddings}, {config.position_origin}); lower max_model_len, or"
            f" leave it out for {config.max_position_embeddings}"
        )
    return options.max_model_len or config.max_position_embeddings


def _with_small_table(model_len: int, config: ModelConfig) -> int:
    """`model_len`, reduced if its table of rotary embeddings would be too large.

    A tiny model's config may have a length at which K and V fit into memory, but not the table.
    """
    position_bytes = config.bytes_per_position
    if not position_bytes:
        return model_len
    table_bytes = max(LEAST_TABLE_BYTES, int(available_memory_bytes() * TABLE_FREE_SHARE))
    most = table_bytes // position_bytes
    if model_len <= most:
        return model_len
    logger.warning(
        "the model's %d positions would need a table of %d bytes for their rotation, so"
        " max_model_len is %d; set max_model_len to have more",
        model_len,
        model_len * position_bytes,
        most,
    )
    return most


def blocks_for(num_tokens: int, options: EngineOptions, layout: KVCacheLayout) -> int:
    """The most KV blocks, over all groups, that a sequence of `num_tokens` tokens ever holds."""
    return Growth(layout.groups, options.block_size).most_to_hold(num_tokens)


def fitting_tokens(
    num_blocks: int, num_wanted_tokens: int, options: EngineOptions, layout: KVCacheLayout
) -> int:
    """Tokens of the longest sequence that fits into `num_blocks` blocks, a multiple of the block
    size.

    At most `num_wanted_tokens`, rounded up to whole blocks. Without this limit, a model that has
    only recurrent states would fit any length.
    """
    low, high = 0, -(-num_wanted_tokens // options.block_size)  # numbers of blocks
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle * options.block_size, options, layout) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * options.block_size


def _choose_num_blocks(
    options: EngineOptions,
    layout: KVCacheLayout,
    model_len: int,
    taken: _Taken,
    is_causal: bool,
) -> int:
    page, taken_bytes = layout.bytes_per_block, taken.weight_bytes + taken.adapter_bytes
    total, available = total_memory_bytes(), available_memory_bytes()
    # First, take the size from an option, or else compute it from the free memory.
    if options.num_blocks is not None:
        num_blocks, source = options.num_blocks, f"num_blocks={options.num_blocks}"
    elif options.kv_cache_bytes is not None:
        num_blocks = options.kv_cache_bytes // page
        source = f"kv_cache_memory={options.kv_cache_bytes}"
    elif options.gpu_memory_utilization is not None:
        usable_bytes = int(total * options.gpu_memory_utilization)
        num_blocks = max(0, usable_bytes - taken_bytes) // page
        source = f"gpu_memory_utilization={options.gpu_memory_utilization}"
    else:
        enough = blocks_for(model_len, options, layout) * options.max_num_seqs
        if not is_causal:  # an encoder needs the blocks of two steps: one planned, one in flight
            step = blocks_for(options.max_num_batched_tokens, options, layout)
            enough = min(enough, 2 * (step + options.max_num_seqs * len(layout.groups)))
        own_bytes = available // options.engines_here
        source = f"{available} bytes of available memory"
        if taken.most_bytes is not None and taken.most_bytes < own_bytes:
            own_bytes = taken.most_bytes
            source = f"{own_bytes} bytes that are free for this engine on its memory nodes"
        free_bytes = max(0, own_bytes - taken_bytes)
        num_blocks = min(enough, int(free_bytes * DEFAULT_FREE_SHARE) // page)
    # Then check that the blocks fit beside the weights, and hold at least one token.
    if num_blocks * page + taken_bytes > available:
        slots, lower = "", ""
        if taken.adapter_bytes:
            slots = f" and {taken.adapter_bytes / 2**30:.1f} GiB of slots for adapters"
            lower = f" max_loras ({options.num_lora_slots}), max_lora_rank ({options.lora_rank}),"
        raise InsufficientMemoryError(
            f"{source} asks for {num_blocks * page / 2**30:.1f} GiB of KV cache beside"
            f" {taken.weight_bytes / 2**30:.1f} GiB of weights{slots}, but the machine has"
            f" {available / 2**30:.1f} GiB available now of {total / 2**30:.1f} GiB in all; lower"
            f"{lower} num_blocks, kv_cache_memory or gpu_memory_utilization, or free memory"
        )
    if num_blocks < (least := blocks_for(1, options, layout)):
        raise InsufficientMemoryError(
            f"{source} leaves no room for the {least} KV blocks ({page} bytes each) of one token in"
            f" the model's {len(layout.groups)} KV groups; give the KV cache more memory"
        )
    return num_blocks
