"""StableLM: Llama with LayerNorm, but only a quarter of each head rotates.

Source: arXiv:2402.17834. Its differences from Llama:

- norms are LayerNorms with biases; by default, a quarter of each head rotates;
- biases of q, k and v are an option;
- with `use_parallel_residual`, attention and MLP read the same norm, and both add to the stream.

Models with norms of q and k that differ by head (StableLM 2 12B) are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, Unpack

from torch import nn

from quire.attention.interface import AttentionCall
from quire.kernels.rotary import Angles
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields, with_names
from quire.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    make_attention,
    make_mlp,
    make_stream_norm,
)
from quire.models.model_entry import ModelEntry

_OUR_NAMES = {"layer_norm_eps": "rms_norm_eps"}
_DEFAULTS = {"layer_norm_eps": 1e-5}  # transformers' value if a config leaves it out
_ROTATES = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """The config of a decoder whose attention and MLP may be parallel."""

    #: Whether attention and MLP read the same norm.
    is_parallel: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(with_names({**_DEFAULTS, **raw}, _OUR_NAMES))
        fields.value("hidden_dropout")  # ignored, since it concerns training
        fields.plain("qk_layernorm", False)
        return cls.read(
            fields,
            partial_rotary=_ROTATES,
            norm="layer",
            qkv_bias=fields.flag("use_qkv_bias", False),
            is_parallel=fields.flag("use_parallel_residual", False),
        )


class ParallelLayer(nn.Module):
    """Attention and an MLP that read the same norm of the residual stream, and add to the
    stream."""

    def __init__(self, config: DecoderConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.input_layernorm = make_stream_norm(config, **storage)
        self.self_attn = make_attention(config, layer, **storage)
        self.mlp = make_mlp(config, layer, **storage)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        normed = stream.normed(self.input_layernorm)
        stream.add(self.self_attn(normed, angles, attention))
        stream.add(self.mlp(normed))


def _make_layer(config: StableLmConfig, layer: int, **options: Any) -> nn.Module:
    kind = ParallelLayer if config.is_parallel else DecoderLayer
    return kind(config, layer, **options)


class StableLmForCausalLM(DecoderForCausalLM):
    """A decoder whose layers are parallel if the config says so."""

    layer_type = staticmethod(_make_layer)


ENTRY = ModelEntry(StableLmConfig, StableLmForCausalLM)
