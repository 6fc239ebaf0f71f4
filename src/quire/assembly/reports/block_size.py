"""Chooses the block size of a model if the options leave it open.

    The size is 16, doubled while a sequence of max_model_len has more than 4,096 blocks,
    or a block holds fewer than 8,192 elements over all layers; at most 256

With small blocks, prompts share more of their common prefix, and fewer slots stay unused. But each
block costs a hash, a table entry, and a separate copy or disk write. A prompt shorter than a block
can't share its prefix, so a block has at most 256 tokens. `quire plan` also considers the load.
Called by `model_kind`.
"""

from dataclasses import replace

from quire.core.memory.cache_options import AUTO_BLOCK_SIZE
from quire.models.config import ModelConfig
from quire.observability.log import get_logger
from quire.options.engine_options import EngineOptions

LEAST, MOST = 16, 256
MOST_BLOCKS = 4096
LEAST_NUMBERS = 8192

logger = get_logger(__name__)


def with_block_size(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """The options with a chosen block size in place of "auto"."""
    if options.block_size != AUTO_BLOCK_SIZE:
        return options
    size = choose_block_size(
        options.max_model_len or config.max_position_embeddings, numbers_per_token(config)
    )
    logger.info("block_size is auto: %d tokens a block", size)
    return replace(options, block_size=size)


def choose_block_size(max_model_len: int, num_numbers: int) -> int:
    """The block size for sequences of up to max_model_len tokens.

    `num_numbers` is the number of elements of K and V per token; 0 if no layer has K and V.
    """
    size = LEAST
    while size < MOST and (
        max_model_len > MOST_BLOCKS * size or 0 < num_numbers * size < LEAST_NUMBERS
    ):
        size *= 2
    return size


def numbers_per_token(config: ModelConfig) -> int:
    """The number of elements of a token's K and V, over all layers."""
    return sum(
        spec.head_dim if spec.value_dim else 2 * spec.num_kv_heads * spec.head_dim
        for spec in config.attention_specs
    )
