"""MTP: heads that a model was trained with, to predict the token after the next (DeepSeek-V3).

Source: arXiv:2412.19437, section 2.2. A head norms the token's embedding and the target's hidden
state before it, projects both together to the hidden size, and has one layer of the target's kind.
It shares the target's embedding and vocabulary projection. Its weights are in the target's files:

    DeepSeek-V3, GLM-4.5     model.layers.N with N the number of the target's layers
    Qwen3-Next, Qwen3.5      mtp
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, ConfigurationError
from quire.hub.model_files import shown_name
from quire.layers.linear import Linear, LinearKind
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.renamed import Rename, RenamedCheckpoint
from quire.models.checkpoints.source import CheckpointSource
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.decoder import DecoderLayer, make_norm
from quire.models.families.hybrids import delta_hybrid
from quire.models.families.latent.latent_decoder import LatentLayer
from quire.models.heads.draft_head import DraftHead, make_rotary
from quire.models.interface import InputEmbeds
from quire.models.layer_kinds import FULL
from quire.models.model_entry import ModelEntry
from quire.models.wrappers import language_model_name


class MTPHead(DraftHead):
    """A head of DeepSeek-V3 or GLM-4.5. Its hidden state for the next draft is the residual stream
    before the last norm."""

    method = "mtp"
    shares_head = True
    layer_type: ClassVar[Callable[..., nn.Module]] = DecoderLayer

    def __init__(
        self, config: DecoderConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.vocab_size = config.vocab_size
        size = self.hidden_size = self.input_size = config.hidden_size
        self.attention_specs = config.attention_specs
        self.enorm = make_norm(config, **storage)
        self.hnorm = make_norm(config, **storage)
        self.eh_proj = Linear(2 * size, (size,), LinearKind.REPLICATED, bias=False, **storage)
        self.layer = self.layer_type(config, 0, **storage)
        self.norm = make_norm(config, **storage)
        self.rotary = make_rotary(config, max_model_len, storage)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        return self._run(token_ids, positions, attention, input_embeds).read()

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        input_embeds: InputEmbeds | None,
    ) -> ResidualStream:
        """The stream after the layer."""
        state = self.hnorm(self.operators.given(self.states, token_ids))
        embeds = self.enorm(self.embed_with(token_ids, input_embeds))
        start = self.eh_proj(self.operators.join(embeds, state))
        stream = ResidualStream(start, self.operators)
        angles = None if self.rotary is None else self.rotary(positions)
        self.layer(stream, angles, attention)
        return stream

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


class LatentMTPHead(MTPHead):
    """A head of DeepSeek-V3 or GLM-4.7-Flash."""

    layer_type = LatentLayer


class HybridMTPHead(MTPHead):
    """A head of Qwen3-Next or Qwen3.5. Its hidden state for the next draft is normed, like the
    target's."""

    layer_type = delta_hybrid.DeltaHybridLayer

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        return self._run(token_ids, positions, attention, input_embeds).normed(self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


_LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.(.*)$")
_OF_LAYER = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head": "norm"}
_OF_QWEN = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.layers.0.": "layer.",
    "mtp.norm.": "norm.",
}
_SHARED = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""Tensors of a head that repeat the target's tensors of these names."""


@dataclass(frozen=True, slots=True)
class MTPEntry(ModelEntry):
    """The entry of the first MTP head of an architecture."""

    def arranged(self, checkpoint: CheckpointSource, config: ModelConfig) -> CheckpointSource:
        # Dataclasses with slots don't support super() without arguments.
        is_hybrid = issubclass(self.model, HybridMTPHead)
        rename = (_rename_of_hybrid if is_hybrid else _rename_of_layer)(checkpoint)
        found = RenamedCheckpoint(checkpoint, rename)
        return ModelEntry.arranged(self, found, replace(config, wrapper=None))


def _rename_of_layer(checkpoint: CheckpointSource) -> Rename:
    """Maps the names of DeepSeek's or GLM's first head to the model's. Raises CheckpointError."""
    # First, find the layer that is a head.
    names = {language_model_name(name): name for name in checkpoint.names}
    numbers = [
        int(found[1])
        for found in map(_LAYER.match, names)
        if found is not None and found[2].startswith("eh_proj.")
    ]
    if not numbers:
        raise _no_head(config_name="num_nextn_predict_layers")
    prefix = f"model.layers.{min(numbers)}."
    # Then, compare the tensors that it shares with the model.
    for own, shared in _SHARED.items():
        theirs = names.get(prefix + own)
        same = names.get(shared, names.get(_SHARED["embed_tokens.weight"]))
        if theirs is not None and (same is None or not checkpoint.equal(theirs, same)):
            raise CheckpointError(
                f"the weights have {shown_name(theirs)}, which differs from {shared}; only MTP"
                " heads that share the model's own can draft. Leave out the speculation by 'mtp'"
            )

    def rename(name: str) -> str | None:
        name = language_model_name(name)
        rest = name.removeprefix(prefix)
        if rest == name or rest in _SHARED:
            return None
        first, _, behind = rest.partition(".")
        if first not in _OF_LAYER:
            return f"layer.{rest}"
        return f"{_OF_LAYER[first]}.{behind.removeprefix('norm.')}"

    return rename


def _rename_of_hybrid(checkpoint: CheckpointSource) -> Rename:
    """Maps the names of Qwen's first head to the model's. Raises CheckpointError."""
    if not any(name.startswith("mtp.fc.") for name in checkpoint.names):
        raise _no_head(config_name="mtp")
    for name in checkpoint.names:
        if name.startswith("mtp.") and not name.startswith(("mtp.layers.", *_OF_QWEN)):
            raise CheckpointError(
                f"the weights have {shown_name(name)}, which MTP heads of this family do not have"
                " here; leave out the speculation by 'mtp'"
            )
    return _rename_qwen


def _rename_qwen(name: str) -> str | None:
    for theirs, ours in _OF_QWEN.items():
        if name.startswith(theirs):
            return delta_hybrid.rename(ours + name.removeprefix(theirs))
    return None


def _no_head(config_name: str) -> CheckpointError:
    return CheckpointError(
        f"the weights have no layer that predicts further tokens ({config_name}), so 'mtp' can't"
        " draft; leave it out, or take a checkpoint that has the layer"
    )


def mtp_config(config: ModelConfig, architectures: Mapping[str, str]) -> DecoderConfig:
    """The config of the first MTP head of the model that `config` describes.

    `architectures` maps the architectures of targets to those of their heads. Raises
    ConfigurationError if heads of this architecture can't draft.
    """
    name = architectures.get(config.architecture)
    if name is None or not isinstance(config, DecoderConfig):
        raise ConfigurationError(
            f"speculation has 'mtp', but quire has no MTP heads of {config.architecture}; leave it"
            f" out. There are heads of {', '.join(architectures)}"
        )
    changes: dict[str, Any] = {
        "architecture": name,
        "num_layers": 1,
        "num_predicting_layers": 0,
        "windows": (None,),
        "tie_word_embeddings": False,
    }
    if config.mixtures is not None:
        # The last mixture is taken: layers without a mixture come first, or are single exceptions.
        mixtures = [each for each in config.mixtures if each is not None]
        changes["mixtures"] = (mixtures[-1] if mixtures else None,)
    if hasattr(config, "layer_types"):
        changes["layer_types"] = (FULL,)
    return replace(config, **changes)
