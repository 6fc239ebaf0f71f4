"""A decoder-only transformer. Its config chooses the norms, the attention and the MLPs.

The default is a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and a
gated MLP, like Llama. GPT-2, with LayerNorm, learned positions and a plain MLP, uses the same
layers. Families with other layers set `layer_type` in a subclass of `DecoderForCausalLM`. Modules
have the names of the checkpoints' tensors.
"""

from collections.abc import Callable
from typing import ClassVar, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import UnsupportedModelError
from quire.kernels.operators import TORCH_OPERATORS
from quire.kernels.rotary import Angles
from quire.kernels.transfers import DeviceLink
from quire.layers.attention import Attention, AttentionBias
from quire.layers.embedding import LMHead, PositionEmbedding, VocabEmbedding
from quire.layers.encoder import FeedForward
from quire.layers.experts import SparseMLP
from quire.layers.linear import Linear, LinearKind
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.operator_module import place_on_host
from quire.layers.position_scale import GrowthFactors
from quire.layers.residual import ResidualStream
from quire.layers.rotary import AxisRotations, RopeLimits, RotaryEmbedding
from quire.layers.storage import Storage
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.interface import CausalLM, InputEmbeds, KeptInputs, TextModel


def make_norm(config: DecoderConfig, **storage: Unpack[Storage]) -> RMSNorm:
    """Build an RMSNorm of the hidden size."""
    size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
    return RMSNorm(size, eps, **storage, offset=offset)


def make_stream_norm(config: DecoderConfig, **storage: Unpack[Storage]) -> RMSNorm | LayerNorm:
    """Build a norm of the residual stream. The config names its kind."""
    if config.norm == "rms":
        return make_norm(config, **storage)
    has_weights = config.norm == "layer"
    return LayerNorm(
        config.hidden_size,
        config.rms_norm_eps,
        **storage,
        has_weight=has_weights,
        has_bias=has_weights,
    )


def make_attention(config: DecoderConfig, layer: int, **storage: Unpack[Storage]) -> Attention:
    """Build a layer's attention."""
    return Attention(
        config.attention_layers.index(layer),
        config.hidden_size,
        config.attention_spec(layer),
        bias=AttentionBias(qkv=config.qkv_bias, output=config.output_bias),
        qk_norm=config.norm_of_q_and_k,
        is_gated=config.has_attention_gate,
        **storage,
    )


def make_mlp(
    config: DecoderConfig, layer: int, **storage: Unpack[Storage]
) -> MLP | FeedForward | SparseMLP:
    """Build a layer's MLP, or its mixture of experts."""
    mixture = config.mixture_of(layer)
    if mixture is not None:
        return SparseMLP(config.hidden_size, mixture, **storage)
    kind = MLP if config.is_gated else FeedForward
    return kind(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        **storage,
        activation=config.activation,
    )


class DecoderLayer(nn.Module):
    """Attention and MLP. Each reads the normed residual stream and adds to the stream."""

    #: Builds a layer's attention, from the arguments of `make_attention`.
    attention_type: ClassVar[Callable[..., nn.Module]] = staticmethod(make_attention)

    def __init__(self, config: DecoderConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = make_stream_norm(config, **storage)
        self.self_attn = self.attention_type(config, layer, **storage)
        self.post_attention_layernorm = make_stream_norm(config, **storage)
        self.mlp = make_mlp(config, layer, **storage)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        read = stream.input_of(self.self_attn, self.input_layernorm)
        stream.add(self.self_attn(read, angles, attention), self.residual_scale)
        read = stream.input_of(self.mlp, self.post_attention_layernorm)
        stream.add(self.mlp(read), self.residual_scale)


class DecoderModel(nn.Module):
    """The model without its head. `layer_type` makes a layer; it has `DecoderLayer`'s arguments."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_type: Callable[..., nn.Module],
        *,
        max_model_len: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, **storage)
        self.layers = nn.ModuleList(
            layer_type(config, layer, **storage) for layer in range(config.num_layers)
        )
        self.embed_positions: PositionEmbedding | None = None
        if config.rope is None:
            self.embed_positions = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, **storage
            )
        self.norm = make_stream_norm(config, **storage)
        self.rotary = nn.ModuleList(
            RotaryEmbedding(
                each.rope,
                RopeLimits(each.rotary_dim, config.max_position_embeddings, max_model_len),
                **storage,
            )
            for each in config.ropes
        )
        self.layer_ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        growth, self.growth = config.query_growth, None
        if growth is not None and max_model_len > growth.length:  # otherwise all factors are 1
            self.growth = GrowthFactors(growth, max_model_len, **storage)

    def angles(self, positions: torch.Tensor) -> list[Angles | None]:
        """Each layer's angles for tokens at positions [T]; None for layers without rotation."""
        angles = [rotary(positions) for rotary in self.rotary]
        if self.growth is not None:
            factors = self.growth(positions)
            for each in angles:
                each.growth = factors
        return [None if index is None else angles[index] for index in self.layer_ropes]


class HeadlessDecoder(TextModel):
    """A decoder with layers of `layer_type`, without a head."""

    layer_type: ClassVar[Callable[..., nn.Module]] = DecoderLayer

    def __init__(
        self, config: DecoderConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.attention_specs = config.attention_specs
        self.recurrent_specs = config.recurrent_specs
        self.embedding_scale = config.embedding_scale
        self.model = DecoderModel(config, self.layer_type, **storage, max_model_len=max_model_len)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> input embeddings [T, hidden_size]."""
        embeds: torch.Tensor = self.model.embed_tokens(token_ids)
        return self._scaled(embeds, self.embedding_scale)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        start = self.embed(token_ids)
        if input_embeds is not None:
            start = self.operators.put_rows(start, *input_embeds)
        if self.model.embed_positions is not None:
            start = self.operators.add(self.model.embed_positions(positions), start)
        angles = self.model.angles(positions)
        stream = ResidualStream(start, self.operators)
        kept = self.kept_inputs
        for index, layer in enumerate(self.model.layers):
            if index == len(self.model.layers) - self.num_host_layers:
                stream, angles = self._on_host(stream, angles)
            if kept is not None and index in kept.layers:
                place = kept.layers.index(index) * self.hidden_size
                self.operators.keep(stream.read(), kept.rows, place)
            layer(stream, angles[index], attention)
            if input_embeds is not None and index < self.num_embed_parts - 1:
                stream.add_rows(*input_embeds, (index + 1) * self.hidden_size)
        if self.num_host_layers:
            hidden = DeviceLink(positions.device).send(stream.read())
            stream = ResidualStream(hidden, self.operators)
        return stream.normed(self.model.norm)

    def _on_host(
        self, stream: ResidualStream, angles: list[Angles | None]
    ) -> tuple[ResidualStream, list[Angles | None]]:
        """The residual stream and the angles of the host's layers, in the host's memory."""
        total = stream.read()
        link = DeviceLink(total.device)
        kept = {id(each): each for each in angles[-self.num_host_layers :] if each is not None}
        tables = [each.table.index_select(0, each.positions) for each in kept.values()]
        growth = [each.growth for each in kept.values() if each.growth is not None]
        there, *fetched = link.fetch(total, *tables, *growth)
        moved: dict[int, Angles] = {}
        places = torch.arange(len(there))
        for at, (key, each) in enumerate(kept.items()):
            moved[key] = Angles(fetched[at], places, each.dtype)
            if growth:  # all rotations have factors, or no rotation has any
                moved[key].growth = fetched[len(tables) + at]
        return ResidualStream(there, TORCH_OPERATORS), [
            None if each is None else moved.get(id(each), each) for each in angles
        ]

    def place_on_host(self, num_layers: int) -> None:
        if type(self).forward is not HeadlessDecoder.forward or self.recurrent_specs:
            super().place_on_host(num_layers)
        layers = self.model.layers
        if num_layers >= len(layers):
            raise UnsupportedModelError(
                f"cpu_layers is {num_layers}, but the model has {len(layers)} layers, of which at"
                " least one stays on the device; lower it, or set device='cpu'"
            )
        self.num_host_layers = num_layers
        for layer in layers[len(layers) - num_layers :]:
            place_on_host(layer)

    def keep_inputs(self, layers: tuple[int, ...], max_num_tokens: int) -> None:
        if type(self).forward is not HeadlessDecoder.forward:  # it keeps nothing
            super().keep_inputs(layers, max_num_tokens)
        weight = next(self.parameters())
        width = len(layers) * self.hidden_size
        rows = torch.empty(max_num_tokens, width, dtype=weight.dtype, device=weight.device)
        self.kept_inputs = KeptInputs(layers, rows)

    def take_contents(
        self, num_embed_parts: int, sections: tuple[int, int, int] | None, max_num_tokens: int
    ) -> None:
        if type(self).forward is not HeadlessDecoder.forward:
            super().take_contents(num_embed_parts, sections, max_num_tokens)
            return
        if num_embed_parts > len(self.model.layers) + 1:
            raise UnsupportedModelError(
                f"the encoder's features are added after {num_embed_parts - 1} layers, but the"
                f" model has {len(self.model.layers)}"
            )
        self.num_embed_parts = num_embed_parts
        if sections is not None:
            rotary = [each for each in self.model.rotary if isinstance(each, RotaryEmbedding)]
            self.axis_rotations = AxisRotations(rotary, sections, max_num_tokens)

    def _scaled(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x if factor == 1.0 else self.operators.scale(x, factor)


class DecoderForCausalLM(HeadlessDecoder, CausalLM):
    """A decoder with a head that predicts the next token."""

    def __init__(
        self, config: DecoderConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.logits_scale = config.logits_scale
        self.logits_soft_cap = config.logits_soft_cap
        self.lm_head = LMHead(self.model.embed_tokens, tied=config.tie_word_embeddings)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._scaled(self.lm_head(hidden), self.logits_scale)
        cap = self.logits_soft_cap
        return logits if cap is None else self.operators.soft_cap(logits, cap)


class DecoderEnds(nn.Module):
    """The embedding of a decoder, and its vocabulary projection, at the decoder's own paths."""

    def __init__(self, config: ModelConfig, *, has_head: bool, **storage: Unpack[Storage]) -> None:
        super().__init__()
        embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, **storage)
        self.model = nn.ModuleDict({"embed_tokens": embed_tokens})
        #: None if only the embedding is wanted.
        self.lm_head: LMHead | None = None
        if has_head:
            self.lm_head = LMHead(embed_tokens, tied=config.tie_word_embeddings)

    @property
    def embed_tokens(self) -> VocabEmbedding:
        """The embedding."""
        found = self.model["embed_tokens"]
        assert isinstance(found, VocabEmbedding)
        return found


class DecoderForScores(HeadlessDecoder):
    """A decoder with a head that scores a sequence by the hidden state of its last token.

    It computes the same as transformers' classes for sequence classification.
    """

    def __init__(
        self, config: DecoderConfig, *, max_model_len: int, **storage: Unpack[Storage]
    ) -> None:
        super().__init__(config, **storage, max_model_len=max_model_len)
        self.score = Linear(
            config.hidden_size, (config.num_labels,), LinearKind.REPLICATED, bias=False, **storage
        )

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.score(vectors)
        return found.float()
