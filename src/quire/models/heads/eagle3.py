"""EAGLE-3: heads that were trained for a finished model, in a folder of their own.

Source: arXiv:2503.01840. A head reads the inputs of three layers of its target: a low one, one in
the middle and a high one. It projects them together to its hidden size, and has one layer like
Llama's, whose attention reads the normed embedding of the token beside the normed state. It
predicts tokens of a small vocabulary of its own: `d2t` has the distance from each of its ids to
the target's id.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError, shown
from quire.kernels.rotary import Angles
from quire.layers.attention import Attention, AttentionBias
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear, LinearKind
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.readers import find_reader
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import make_mlp, make_norm
from quire.models.heads.draft_head import DraftHead, make_rotary
from quire.models.interface import InputEmbeds
from quire.models.model_entry import ModelEntry

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""The names of a head in its config.json."""

_TABLE, _UNUSED = "d2t", ("t2d", "d2t")
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """The config of a head. `vocab_size` is the target's."""

    #: Number of tokens that the head can draft.
    draft_vocab_size: int
    #: Sum of the sizes of the target's inputs that the head reads.
    target_size: int
    #: The layers of the target whose inputs the head reads; None if its config does not say.
    target_layers: tuple[int, ...] | None
    #: Whether the residual stream begins with the normed state instead of the state.
    norm_before_residual: bool
    #: Whether the checkpoint has an embedding of its own.
    has_embedding: bool = False
    #: For each own token id, the target's.
    token_ids: tuple[int, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        if fields.integer("num_hidden_layers", 1) != 1:
            raise UnsupportedModelError(
                f"config.json: num_hidden_layers is {shown(fields.value('num_hidden_layers'))}, but"
                " only EAGLE-3 heads of one layer are supported"
            )
        inner = fields.value("eagle_config") or {}
        if not isinstance(inner, dict) or inner.get("use_aux_hidden_state", True) is not True:
            raise UnsupportedModelError(
                f"config.json: eagle_config is {shown(inner)}, but only heads that read the inputs"
                " of three layers are supported (use_aux_hidden_state)"
            )
        layers = _read_layers(fields, inner)
        count = 3 if layers is None else len(layers)
        width = fields.integer("target_hidden_size", fields.integer("hidden_size"))
        bias = fields.flag("attention_bias", False)
        return cls.read(
            fields,
            draft_vocab_size=fields.integer("draft_vocab_size", fields.integer("vocab_size")),
            target_size=count * width,
            target_layers=layers,
            norm_before_residual=fields.flag("norm_before_residual", False),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
            tie_word_embeddings=False,
        )


def _read_layers(fields: ConfigFields, inner: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers of the target whose inputs the head reads; None if the config does not say.

    In `eagle_config`, as SGLang writes it, a number stands for the output of that layer. Outside of
    it, as vLLM writes it, it stands for the layer's input.
    """
    of_outputs = inner.get(_LAYERS)
    layers = fields.value(_LAYERS) if of_outputs is None else of_outputs
    if layers is None:
        return None
    if not (isinstance(layers, list) and layers and all(type(each) is int for each in layers)):
        raise CheckpointError(
            f"config.json: {_LAYERS} is {shown(layers)}, but must be a list of layer numbers"
        )
    return tuple(layers) if of_outputs is None else tuple(each + 1 for each in layers)


class Eagle3Layer(nn.Module):
    """Attention over the normed embedding beside the normed state, and an MLP."""

    def __init__(self, config: Eagle3Config, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = make_norm(config, **storage)
        self.hidden_norm = make_norm(config, **storage)
        self.self_attn = Attention(
            0,
            config.hidden_size,
            config.attention_spec(0),
            bias=AttentionBias(qkv=config.qkv_bias, output=config.output_bias),
            input_size=2 * config.hidden_size,
            **storage,
        )
        self.post_attention_layernorm = make_norm(config, **storage)
        self.mlp = make_mlp(config, 0, **storage)


class OwnVocabulary(Linear):
    """Logits [R, own vocabulary size] in fp32."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, own vocabulary size] fp32."""
        return self.method.apply(self, hidden, torch.float32)


class Eagle3Head(DraftHead):
    """A head. Its hidden state for the next draft is its residual stream."""

    method = "eagle3"

    def __init__(
        self, config: Eagle3Config, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.vocab_size = config.draft_vocab_size
        size = self.hidden_size = config.hidden_size
        self.input_size = config.target_size
        self.attention_specs = config.attention_specs
        self.target_layers = config.target_layers or ()
        if config.has_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, size, **storage)
        self.shares_embedding = not config.has_embedding
        self.fc = Linear(config.target_size, (size,), LinearKind.REPLICATED, bias=False, **storage)
        self.midlayer = Eagle3Layer(config, **storage)
        self.norm = make_norm(config, **storage)
        self.lm_head = OwnVocabulary(
            size, (config.draft_vocab_size,), LinearKind.REPLICATED, bias=False, **storage
        )
        self.rotary = make_rotary(config, max_model_len, storage)
        if config.token_ids is not None:
            self.token_ids = torch.tensor(config.token_ids, device=storage["device"])

    def states_of(self, hidden: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.fc(hidden)
        return states

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        layer = self.midlayer
        state = self.operators.given(self.states, token_ids)
        normed = layer.hidden_norm(state)
        embeds = layer.input_layernorm(self.embed_with(token_ids, input_embeds))
        joined = self.operators.join(embeds, normed)
        start = normed if layer.norm_before_residual else state
        stream = ResidualStream(start, self.operators)
        angles: Angles | None = None if self.rotary is None else self.rotary(positions)
        stream.add(layer.self_attn(joined, angles, attention))
        stream.add(layer.mlp(stream.normed(layer.post_attention_layernorm)))
        return stream.read()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def rename_eagle3(name: str) -> str | None:
    """Map a tensor's name in the files to the head's; None for the tables between vocabularies."""
    if name in _UNUSED:
        return None
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def load_eagle3_config(folder: Path, target: ModelConfig) -> Eagle3Config:
    """Read the config of the head in `folder`, which drafts for the model of the config `target`.

    Raises CheckpointError, UnsupportedModelError, and ConfigurationError if the head does not fit
    the target.
    """
    # First, read the config.
    raw = find_reader(folder).read_config(folder)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{folder}: architectures is {shown(names)}, but heads that draft are"
            f" {' or '.join(ARCHITECTURES)}"
        )
    config = Eagle3Config.from_hf(raw)
    files = SafetensorsFiles(folder)
    has_embedding = any(rename_eagle3(name) == "embed_tokens.weight" for name in files.names)
    # Then, check that the head fits the target.
    layers = config.target_layers
    if layers is None:  # the layers in the paper's code
        count = target.num_layers
        layers = (2, count // 2, count - 3)
    if sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise ConfigurationError(
            f"the head of {folder} reads the inputs of the layers {', '.join(map(str, layers))},"
            f" but the model has {target.num_layers} layers; take a head for this model"
        )
    if config.target_size != len(layers) * target.hidden_size or (
        not has_embedding and config.hidden_size != target.hidden_size
    ):
        raise ConfigurationError(
            f"the head of {folder} is for a model of another hidden size than {target.hidden_size};"
            " take a head for this model"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigurationError(
            f"the head of {folder} is for {config.vocab_size} tokens, but the model has"
            f" {target.vocab_size}; take a head for this model"
        )
    return replace(
        config,
        architecture=ARCHITECTURES[0],
        target_layers=layers,
        has_embedding=has_embedding,
        token_ids=_read_token_ids(folder, files, config),
    )


def _read_token_ids(
    folder: Path, files: SafetensorsFiles, config: Eagle3Config
) -> tuple[int, ...] | None:
    """For each own token id, the target's id; None if they are equal."""
    size = config.draft_vocab_size
    if _TABLE not in files.names:
        if size == config.vocab_size:
            return None
        raise CheckpointError(
            f"{folder}: the weights lack {_TABLE}, which maps the head's {size} tokens to those of"
            " the model; the download is not whole"
        )
    if files.shape(_TABLE) != (size,) or files.stored_dtype(_TABLE) != torch.int64:
        raise CheckpointError(
            f"{folder}: {_TABLE} must be {size} integers of 64 bits, as draft_vocab_size says"
        )
    with files.stored_rows(_TABLE, range(size)) as distances:
        token_ids = torch.arange(size) + distances
    if not ((token_ids >= 0) & (token_ids < config.vocab_size)).all():
        raise CheckpointError(
            f"{folder}: {_TABLE} maps to tokens that the model does not have; fetch it again"
        )
    return tuple(token_ids.tolist())


ENTRY = ModelEntry(Eagle3Config, Eagle3Head, embedding="embed_tokens.weight", rename=rename_eagle3)
