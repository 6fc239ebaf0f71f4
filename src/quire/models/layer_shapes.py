"""The shapes of a decoder's layers that are not `decoder.DecoderLayer`'s: where their norms stand.

Families give one to their model as `layer_type`. The trees of modules are named as most checkpoints
name them.
"""

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.kernels.rotary import Angles
from quire.layers.residual import ResidualStream
from quire.models.config import DecoderConfig
from quire.models.decoder import make_attention, make_mlp, make_norm


class PostNormLayer(nn.Module):
    """Attention and MLP; each reads the residual stream, and the norm of its result is added."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.self_attn = make_attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = make_norm(config, dtype=dtype, device=device)
        self.mlp = make_mlp(config, layer, dtype=dtype, device=device)
        self.post_feedforward_layernorm = make_norm(config, dtype=dtype, device=device)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Adds to the stream."""
        attended = self.self_attn(stream.read(), angles, attention)
        stream.add(self.post_attention_layernorm(attended, overwrites=True))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.read()), overwrites=True))


class SandwichLayer(nn.Module):
    """Attention and MLP; each reads the norm of the residual stream, and the norm of its result is
    added."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, dtype=dtype, device=device)
        self.self_attn = make_attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = make_norm(config, dtype=dtype, device=device)
        self.pre_feedforward_layernorm = make_norm(config, dtype=dtype, device=device)
        self.mlp = make_mlp(config, layer, dtype=dtype, device=device)
        self.post_feedforward_layernorm = make_norm(config, dtype=dtype, device=device)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Adds to the stream."""
        attended = self.self_attn(stream.normed(self.input_layernorm), angles, attention)
        stream.add(self.post_attention_layernorm(attended, overwrites=True))
        output = self.mlp(stream.normed(self.pre_feedforward_layernorm))
        stream.add(self.post_feedforward_layernorm(output, overwrites=True))
