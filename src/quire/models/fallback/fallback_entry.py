"""The entry of a model that a class of transformers computes.

Not in the registry, since it depends on the config. Called by `models.registry`.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.models.checkpoints.source import CheckpointSource
from quire.models.config import ModelConfig
from quire.models.fallback.conversion import ConvertedCheckpoint, shape_model
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.fallback.model import FallbackForCausalLM
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry


@dataclass(frozen=True, slots=True)
class _FallbackEntry(ModelEntry):
    """The entry of one model that a class of transformers computes."""

    def open(self, folder: Path, config: ModelConfig) -> CheckpointSource:
        assert isinstance(config, FallbackConfig)
        # Dataclasses with slots don't support super() without arguments.
        return ConvertedCheckpoint(ModelEntry.open(self, folder, config), shape_model(config.raw))


def fallback_entry(config: FallbackConfig) -> ModelEntry:
    """The entry of the model with this config."""
    return _FallbackEntry(
        FallbackConfig,
        FallbackForCausalLM,
        CHECKPOINT_PARTS,
        embedding=config.embedding,
        head=config.head,
    )
