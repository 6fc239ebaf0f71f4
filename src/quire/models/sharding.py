"""Checks whether a model can be split over ranks, and makes each rank's config.

A rank has some of the query heads, as whole heads, and the KV heads that these query heads read.
If there are fewer KV heads than ranks, several ranks have the same KV heads. Called by
`checkpoints.loader` and `assembly`.
"""

from quire.errors import ConfigurationError
from quire.models.config import ModelConfig


def check_split(config: ModelConfig, num_ranks: int) -> None:
    """Raise ConfigurationError if the model can't be split over `num_ranks`."""
    reason = config.why_not_split(num_ranks)
    if reason is not None:
        possible = [n for n in range(1, config.num_heads + 1) if config.why_not_split(n) is None]
        raise ConfigurationError(
            f"tensor_parallel_size is {num_ranks}, but {reason}; this model can be split over"
            f" {', '.join(map(str, possible))}"
        )


def split_config(config: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """The config of the model that a rank builds. `check_split` must allow `num_ranks`."""
    return config.share_of(rank, num_ranks)
