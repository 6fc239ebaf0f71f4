"""LFM2: gated short convolutions, with attention in every second or third layer.

Source: arXiv:2511.23404. Its differences from Llama:

- most layers are `layers.mixers.gated_conv`; the others have attention with norms of q and k;
- by default, the MLP has two thirds of the size that the config names, rounded up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, shown
from quire.kernels.rotary import Angles
from quire.layers.mixers.gated_conv import GatedConv
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields, with_names
from quire.models.decoder import DecoderForCausalLM, make_attention, make_mlp, make_norm
from quire.models.layer_kinds import FULL, read_layer_types
from quire.models.mixture_config import replaced
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry
from quire.recurrence.state_backend import RecurrentSpec
from quire.recurrence.state_specs import ShortConvSpec

CONV = "conv"
CONV_PARTS = {"in_proj": ("in_before", "in_after", "in_x")}
"""For the fused linear, the names of its parts, as `arrangement` gives them."""
# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_IGNORED = (
    *("block_dim", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init", "conv_dim"),
    *("block_mlp_init_scale", "block_out_init_scale", "conv_dim_out", "conv_use_xavier_init"),
    *("num_heads", "theta", "use_pos_enc"),
)
"""Fields of the code that trained the models, which transformers ignores."""
_NAMES = {
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".conv.conv.": ".conv.conv.conv_taps.",
    "model.embedding_norm.": "model.norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """The config of a decoder with gated short convolutions."""

    #: CONV or FULL for each layer.
    layer_types: tuple[str, ...]
    #: The convolution of CONV layers.
    conv: ShortConvSpec
    #: Whether the convolutions and their projections have biases.
    conv_bias: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(with_names({**_DEFAULTS, **raw}, {"norm_eps": "rms_norm_eps"}))
        for name in _IGNORED:
            fields.value(name)
        hidden_size = fields.integer("hidden_size")
        tied = fields.flag("tie_word_embeddings", True)
        attending = _attending_layers(fields)
        return cls.read(
            fields,
            intermediate_size=_intermediate_size(fields),
            tie_word_embeddings=fields.flag("tie_embedding", tied),
            qk_norm="head",
            layer_types=read_layer_types(
                fields, lambda layer: FULL if layer in attending else CONV, (CONV, FULL)
            ),
            conv=ShortConvSpec(hidden_size, fields.integer("conv_L_cache", 3), has_silu=False),
            conv_bias=fields.flag("conv_bias", False),
        )

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        return (self.conv,) * self.layer_types.count(CONV)

    @property
    def attention_layers(self) -> Sequence[int]:
        return [layer for layer, kind in enumerate(self.layer_types) if kind == FULL]

    def why_not_split(self, num_ranks: int) -> str | None:
        if self.conv.num_channels % num_ranks:
            return f"the model's {self.conv.num_channels} channels can't be divided equally"
        return DecoderConfig.why_not_split(self, num_ranks)

    def share_of(self, rank: int, num_ranks: int) -> Self:
        conv = replace(self.conv, num_channels=self.conv.num_channels // num_ranks)
        return replace(DecoderConfig.share_of(self, rank, num_ranks), conv=conv)


def _attending_layers(fields: ConfigFields) -> Sequence[int]:
    """Read `full_attn_idxs`, which old configs have in place of `layer_types`; all layers if it is
    missing."""
    named, num_layers = fields.value("full_attn_idxs"), fields.integer("num_hidden_layers")
    if named is None:
        return range(num_layers)
    if not isinstance(named, list) or not all(type(each) is int for each in named):
        raise CheckpointError(
            f"config.json: full_attn_idxs is {shown(named)}, but must be a list of layers"
        )
    return named


def _intermediate_size(fields: ConfigFields) -> int:
    """The size of the MLP."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    unit = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // unit) * unit


class Lfm2Layer(nn.Module):
    """A mixer and an MLP. Each reads the normed residual stream and adds to the stream."""

    def __init__(self, config: Lfm2Config, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, **storage)
        self.conv: GatedConv | None = None
        if config.layer_types[layer] == CONV:
            index = config.layer_types[:layer].count(CONV)
            self.conv = GatedConv(
                index, config.hidden_size, config.conv, has_bias=config.conv_bias, **storage
            )
        else:
            self.self_attn = make_attention(config, layer, **storage)
        self.post_attention_layernorm = make_norm(config, **storage)
        self.mlp = make_mlp(config, layer, **storage)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        normed = stream.normed(self.input_layernorm)
        if self.conv is not None:
            stream.add(self.conv(normed))
        else:
            stream.add(self.self_attn(normed, angles, attention))
        stream.add(self.mlp(stream.normed(self.post_attention_layernorm)))


class Lfm2ForCausalLM(DecoderForCausalLM):
    """A decoder of layers with gated short convolutions or attention."""

    layer_type = Lfm2Layer


def arrangement(config: Lfm2Config) -> Arrangement:
    """Split the input projection of the convolutions."""
    parts = dict.fromkeys(CONV_PARTS["in_proj"], config.conv.num_channels)
    return Arrangement(fused={"in_proj": parts})


def rename(name: str) -> str:
    """Map a tensor's name in the files to the model's."""
    return replaced(name, _NAMES)


ENTRY = ModelEntry(
    Lfm2Config,
    Lfm2ForCausalLM,
    CHECKPOINT_PARTS | CONV_PARTS,
    rename=rename,
    arrangement=arrangement,
)
