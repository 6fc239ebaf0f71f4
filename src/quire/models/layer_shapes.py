"""Decoder layers whose norms are in other places than in `decoder.DecoderLayer`.

Families use them as their models' `layer_type`. Modules have the names of most checkpoints'
tensors.
"""

from typing import Unpack

from torch import nn

from quire.attention.interface import AttentionCall
from quire.kernels.rotary import Angles
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.config import DecoderConfig
from quire.models.decoder import make_attention, make_mlp, make_norm


class PostNormLayer(nn.Module):
    """Attention and MLP. Each reads the residual stream and adds the norm of its result to it."""

    def __init__(self, config: DecoderConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.self_attn = make_attention(config, layer, **storage)
        self.post_attention_layernorm = make_norm(config, **storage)
        self.mlp = make_mlp(config, layer, **storage)
        self.post_feedforward_layernorm = make_norm(config, **storage)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        attended = self.self_attn(stream.read(), angles, attention)
        stream.add(self.post_attention_layernorm(attended, overwrites=True))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.read()), overwrites=True))


class SandwichLayer(nn.Module):
    """Attention and MLP. Each reads the normed stream and adds the norm of its result to it."""

    def __init__(self, config: DecoderConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, **storage)
        self.self_attn = make_attention(config, layer, **storage)
        self.post_attention_layernorm = make_norm(config, **storage)
        self.pre_feedforward_layernorm = make_norm(config, **storage)
        self.mlp = make_mlp(config, layer, **storage)
        self.post_feedforward_layernorm = make_norm(config, **storage)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        read = stream.input_of(self.self_attn, self.input_layernorm)
        attended = self.self_attn(read, angles, attention)
        stream.add(self.post_attention_layernorm(attended, overwrites=True))
        output = self.mlp(stream.input_of(self.mlp, self.pre_feedforward_layernorm))
        stream.add(self.post_feedforward_layernorm(output, overwrites=True))
