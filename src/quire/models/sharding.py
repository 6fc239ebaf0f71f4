"""Which models can be split over ranks, and each rank's model.

Every rank has whole heads: its share of the query heads and the KV heads that these read, which
several ranks hold where there are fewer of them than ranks. The config says what can be
split. Called by `checkpoints.loader` and `assembly`.
"""

from quire.errors import ConfigurationError
from quire.models.config import ModelConfig


def check_split(config: ModelConfig, num_ranks: int) -> None:
    """Raises ConfigurationError where the model can't be split over so many ranks."""
    reason = config.why_not_split(num_ranks)
    if reason is not None:
        possible = [n for n in range(1, config.num_heads + 1) if config.why_not_split(n) is None]
        raise ConfigurationError(
            f"tensor_parallel_size is {num_ranks}, but {reason}; this model can be split over"
            f" {', '.join(map(str, possible))}"
        )


def split_config(config: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """The model that a rank builds. num_ranks: one that `check_split` allows."""
    return config.share_of(rank, num_ranks)
