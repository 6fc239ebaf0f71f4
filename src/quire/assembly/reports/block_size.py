"""The block size of a model where the options leave it to be chosen.

    16, and twice as much while a sequence of max_model_len has more than 4,096 blocks,
    or a block holds fewer than 8,192 numbers over all layers; at most 256

Small blocks share more of what prompts have in common, and leave fewer slots unfilled. But each is
hashed, has an entry in a table, and is copied or kept on disk by itself; and a prompt that is
shorter than a block shares nothing, so more than 256 are never chosen. `quire plan` chooses for a
load, too. Called by `model_kind`.
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
    """The options, with a block size."""
    if options.block_size != AUTO_BLOCK_SIZE:
        return options
    size = choose_block_size(
        options.max_model_len or config.max_position_embeddings, numbers_per_token(config)
    )
    logger.info("block_size is auto: %d tokens a block", size)
    return replace(options, block_size=size)


def choose_block_size(max_model_len: int, num_numbers: int) -> int:
    """For sequences of this length and a model that keeps so many numbers a token (0: it keeps
    none that grow with the context)."""
    size = LEAST
    while size < MOST and (
        max_model_len > MOST_BLOCKS * size or 0 < num_numbers * size < LEAST_NUMBERS
    ):
        size *= 2
    return size


def numbers_per_token(config: ModelConfig) -> int:
    """That a token's K and V have, over all layers."""
    return sum(
        spec.head_dim if spec.value_dim else 2 * spec.num_kv_heads * spec.head_dim
        for spec in config.attention_specs
    )
