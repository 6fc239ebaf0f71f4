"""Which models can be split over how many ranks, and the model that one of them builds.

Every rank has whole heads: its share of the query heads and the KV heads that these read, which
several ranks hold where there are fewer of them than ranks. Called by `loader` and `engine`.
"""

import dataclasses

from quire.errors import ConfigurationError
from quire.layers.sharded import vocab_share
from quire.models.config import DecoderConfig


def check_split(config: DecoderConfig, num_ranks: int) -> None:
    """Raises ConfigurationError where the model can't be split over so many ranks."""
    reason = _why_not(config, num_ranks)
    if reason is not None:
        possible = [n for n in range(1, config.num_heads + 1) if _why_not(config, n) is None]
        raise ConfigurationError(
            f"tensor_parallel_size is {num_ranks}, but {reason}; this model can be split over"
            f" {', '.join(map(str, possible))}"
        )


def _why_not(config: DecoderConfig, num_ranks: int) -> str | None:
    if config.num_heads % num_ranks:
        return f"the model's {config.num_heads} attention heads can't be shared out equally"
    if config.num_kv_heads % num_ranks and num_ranks % config.num_kv_heads:
        return f"neither it nor the model's {config.num_kv_heads} KV heads divide the other"
    if config.intermediate_size % num_ranks:
        return f"the model's intermediate_size, {config.intermediate_size}, is no multiple of it"
    if not vocab_share(config.vocab_size, num_ranks - 1, num_ranks):
        return f"of the model's {config.vocab_size} tokens there would be none for the last rank"
    return None


def split_config(config: DecoderConfig, rank: int, num_ranks: int) -> DecoderConfig:
    """The model that a rank builds: with its share of heads, MLP and vocabulary.

    num_ranks: one that `check_split` allows.
    """
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
        vocab_size=len(vocab_share(config.vocab_size, rank, num_ranks)),
    )
