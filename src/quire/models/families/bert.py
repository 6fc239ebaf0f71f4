"""BERT: an encoder, whose tokens attend to each other in both directions.

Source: arXiv:1810.04805. Learned vectors for positions and token types are added to the embeddings;
norms come after attention and MLP; the MLP has no gate. Most embedding models and cross-encoders of
moderate size have this architecture (MiniLM, BGE, E5, GTE).

A sequence of two texts has two token types. Tokens of type i have i * vocab_size added to their
ids, so the model needs only token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import nn
from torch.nn import functional

from quire.attention.interface import AttentionCall, AttentionSpec
from quire.errors import CheckpointError
from quire.formats.weight_format import empty_parameter
from quire.kernels.activations import HF_ACTIVATIONS, ActivationFunction
from quire.layers.attention import Attention, AttentionBias
from quire.layers.encoder import FeedForward
from quire.layers.linear import Linear, LinearKind
from quire.layers.norm import LayerNorm
from quire.layers.storage import Storage
from quire.models.checkpoints.renamed import Rename
from quire.models.config import ModelConfig, read_architecture, read_dtype, read_num_labels
from quire.models.config_fields import ConfigFields
from quire.models.interface import InputEmbeds, TextModel
from quire.models.model_entry import QKV_PARTS, ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
# Parts of names in the checkpoint -> their replacements, which are applied in this order.
_OTHER_NAMES = {
    ".attention.self.query.": ".attention.q_proj.",
    ".attention.self.key.": ".attention.k_proj.",
    ".attention.self.value.": ".attention.v_proj.",
    ".attention.output.dense.": ".attention.o_proj.",
    ".attention.output.LayerNorm.": ".attention_norm.",
    ".intermediate.dense.": ".mlp.up_proj.",
    ".output.dense.": ".mlp.down_proj.",
    ".output.LayerNorm.": ".output_norm.",
    "bert.pooler.dense.": "pooler.",
    ".gamma": ".weight",
    ".beta": ".bias",
}
# Heads that only training uses, and a buffer that can be computed from the config.
_UNUSED = ("cls.", "bert.embeddings.position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    """The config of an encoder. Dropout fields are ignored, since they concern training."""

    layer_norm_eps: float
    type_vocab_size: int
    activation: ActivationFunction

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"):
            fields.value(name)  # ignored, since they concern training
        for name in ("gradient_checkpointing", "sentence_transformers"):
            fields.value(name)  # `models.pooling_config` reads the latter
        fields.value("sbert_ce_default_activation_function")
        fields.choice("position_embedding_type", "absolute", ("absolute",))
        num_heads, hidden_size = (
            fields.integer("num_attention_heads"),
            fields.integer("hidden_size"),
        )
        if hidden_size % num_heads:
            raise CheckpointError(
                f"config.json: hidden_size is {hidden_size}, but must be a multiple of"
                f" num_attention_heads, {num_heads}"
            )
        activation = fields.choice("hidden_act", "gelu", ("gelu", "gelu_pytorch_tanh"))
        config = cls(
            architecture=read_architecture(fields),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            dtype=read_dtype(fields),
            num_labels=read_num_labels(fields),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            type_vocab_size=fields.integer("type_vocab_size"),
            activation=HF_ACTIVATIONS[activation],
        )
        fields.value("tie_word_embeddings")  # ignored, since there is no head to tie
        config.check_size(hidden_size * (4 * hidden_size + 2 * config.intermediate_size))
        return replace(config, left_out=fields.finish())

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            causal=False,
        )
        return (spec,) * self.num_layers

    @property
    def num_token_types(self) -> int:
        return self.type_vocab_size


def rename_with_head(name: str) -> str | None:
    """Map a tensor's name in a checkpoint of any version to its name in a model with a head."""
    if not name.startswith(("bert.", "classifier.", "cls.")):
        name = f"bert.{name}"
    if name.startswith(_UNUSED):
        return None
    for theirs, ours in _OTHER_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def rename_with_token_head(name: str) -> str | None:
    """Same as `rename_with_head`, for a head that scores tokens, without a pooling layer."""
    found = rename_with_head(name)
    return None if found is not None and found.startswith("pooler.") else found


def rename_without_head(name: str) -> str | None:
    """Same as `rename_with_head`, for a model without a head. Returns None for a head's tensors."""
    found = rename_with_head(name)
    is_of_head = found is not None and found.startswith(("pooler.", "classifier."))
    return None if is_of_head else found


class _Table(nn.Module):
    """An embedding table with weight [N, H]."""

    def __init__(self, count: int, size: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.weight = empty_parameter((count, size), **storage)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] -> [T, H]."""
        return functional.embedding(indices, self.weight)


class BertEmbeddings(nn.Module):
    """The normalised sum of the embeddings of words, positions and token types."""

    def __init__(self, config: BertConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.vocab_size, size = config.vocab_size, config.hidden_size
        counts = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
        self.word_embeddings, self.position_embeddings, self.token_type_embeddings = (
            _Table(count, size, **storage) for count in counts
        )
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps, **storage)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, input_embeds: InputEmbeds | None
    ) -> torch.Tensor:
        """token_ids, positions [T] -> [T, H]. `input_embeds` replace the embeddings of words."""
        words = self.word_embeddings(token_ids % self.vocab_size)
        if input_embeds is not None:
            places, rows = input_embeds
            words.index_copy_(0, places, rows.to(words.dtype))
        types = self.token_type_embeddings(token_ids // self.vocab_size)
        words.add_(types).add_(self.position_embeddings(positions))
        embeds: torch.Tensor = self.LayerNorm(words)
        return embeds


class BertLayer(nn.Module):
    """Attention and MLP. Each is followed by a norm of the sum of its input and result."""

    def __init__(self, config: BertConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.attention = Attention(
            layer,
            config.hidden_size,
            config.attention_specs[layer],
            bias=AttentionBias(qkv=True, output=True),
            **storage,
        )
        self.mlp = FeedForward(
            config.hidden_size, config.intermediate_size, activation=config.activation, **storage
        )
        self.attention_norm, self.output_norm = (
            LayerNorm(config.hidden_size, config.layer_norm_eps, **storage) for _ in range(2)
        )

    def forward(self, hidden: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        hidden = self.attention_norm(self.attention(hidden, None, attention).add_(hidden))
        output: torch.Tensor = self.output_norm(self.mlp(hidden).add_(hidden))
        return output


class BertBody(nn.Module):
    """The whole model except its head."""

    def __init__(self, config: BertConfig, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, **storage)
        layers = (BertLayer(config, layer, **storage) for layer in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})


class BertModel(TextModel):
    """An encoder without a head."""

    def __init__(
        self, config: BertConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.attention_specs = config.attention_specs
        self.bert = BertBody(config, **storage)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.bert.embeddings(token_ids, positions, input_embeds)
        for layer in self.bert.encoder["layer"].children():
            hidden = layer(hidden, attention)
        return hidden


class BertForScores(BertModel):
    """An encoder with a head that scores a sequence by its first token's hidden state."""

    def __init__(
        self, config: BertConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        size = config.hidden_size
        self.pooler, self.classifier = (
            Linear(size, (outputs,), LinearKind.REPLICATED, bias=True, **storage)
            for outputs in (size, config.num_labels)
        )

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier(torch.tanh(self.pooler(vectors)))
        return found.float()


class BertForTokenScores(BertModel):
    """An encoder with a head that scores each token by its hidden state."""

    def __init__(
        self, config: BertConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.classifier = Linear(
            config.hidden_size, (config.num_labels,), LinearKind.REPLICATED, bias=True, **storage
        )

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier(vectors)
        return found.float()


def _entry(model: type[TextModel], rename: Rename) -> ModelEntry:
    return ModelEntry(BertConfig, model, QKV_PARTS, rename=rename)


HEADLESS_ENTRY = _entry(BertModel, rename_without_head)
SCORES_ENTRY = _entry(BertForScores, rename_with_head)
TOKEN_SCORES_ENTRY = _entry(BertForTokenScores, rename_with_token_head)
