"""The entry of an architecture in the registry: its classes, and the format of its checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.models.checkpoints.arranged import ArrangedCheckpoint, Arrangement
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.checkpoints.renamed import (
    Rename,
    RenamedCheckpoint,
    with_missing_prefix,
    with_prefix,
    without_layers,
)
from quire.models.checkpoints.source import CheckpointSource
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM, DecoderForScores, HeadlessDecoder
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.interface import CausalLM, TextModel
from quire.models.wrappers import WRAPPERS

CHECKPOINT_PARTS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""For each fused linear, the names of its parts in most checkpoints."""

QKV_PARTS = {"qkv_proj": CHECKPOINT_PARTS["qkv_proj"]}
"""The fused linears and their parts in models whose MLPs have no gate."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The classes of an architecture, and the format of its checkpoints."""

    config: type[ModelConfig]
    model: type[TextModel]
    #: For each fused linear, the names of its parts in the checkpoint: q_proj, k_proj, v_proj.
    checkpoint_parts: Mapping[str, tuple[str, ...]] = field(default_factory=CHECKPOINT_PARTS.copy)
    #: The name of the embedding, which may be tied to the head.
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    #: Maps a tensor's name in the files to its name in the model; None if the names are equal.
    rename: Rename | None = None
    #: Maps a config to the arrangement of linears in the files; None if it is Llama's.
    arrangement: Callable[[Any], Arrangement] | None = None
    #: Splits stacked tensors of the renamed checkpoint into a tensor for each expert.
    unstack: Callable[[CheckpointSource], CheckpointSource] | None = None

    @property
    def generates(self) -> bool:
        """Whether the model predicts tokens."""
        return issubclass(self.model, CausalLM)

    def open(self, folder: Path, config: ModelConfig) -> CheckpointSource:
        """Open a model folder's weights, and convert them to the model's names and arrangement.

        `config` must have this entry's type. Raises CheckpointError.
        """
        return self.arranged(open_checkpoint(folder), config)

    def arranged(self, checkpoint: CheckpointSource, config: ModelConfig) -> CheckpointSource:
        """Convert a checkpoint to the model's names and arrangement."""
        # The order matters: each step expects the names that the step before it produces.
        if config.wrapper is not None:
            checkpoint = WRAPPERS[config.wrapper].open(checkpoint, config.hidden_size)
        if not isinstance(config, FallbackConfig):  # its conversion handles all prefixes
            checkpoint = with_missing_prefix(checkpoint, self.embedding)
        if self.rename is not None:
            checkpoint = RenamedCheckpoint(checkpoint, self.rename)
        if config.num_predicting_layers:
            end = config.num_layers + config.num_predicting_layers
            predicting = without_layers(range(config.num_layers, end))
            checkpoint = RenamedCheckpoint(checkpoint, predicting)
        if self.arrangement is not None:
            checkpoint = ArrangedCheckpoint(checkpoint, self.arrangement(config))
        return checkpoint if self.unstack is None else self.unstack(checkpoint)


def headless_entry(config: type[ModelConfig]) -> ModelEntry:
    """The entry of a decoder without a head. If the files have a head, it is ignored."""
    return ModelEntry(config, HeadlessDecoder, rename=with_prefix("model.", "lm_head.", "score."))


def scores_entry(config: type[ModelConfig]) -> ModelEntry:
    """The entry of a decoder with a head that classifies sequences."""
    return ModelEntry(config, DecoderForScores)


def mixture_entry(
    config: type[ModelConfig],
    rename: Rename | None = None,
    unstack: Callable[[CheckpointSource], CheckpointSource] = UnstackedCheckpoint,
) -> ModelEntry:
    """The entry of a mixture of experts. In the files, experts may be stacked or separate."""
    return ModelEntry(config, DecoderForCausalLM, rename=rename, unstack=unstack)
