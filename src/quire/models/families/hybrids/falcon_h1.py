"""Falcon-H1: parallel attention and Mamba-2 in every layer, with many multipliers.

Source: arXiv:2507.22448. Its differences from Llama:

- attention and `layers.mixers.mamba2` read the same norm, and both add to the residual stream;
- factors of the config multiply embeddings, logits, keys, and the blocks' inputs and outputs. The
  factors of attention's input and of the MLP's gate are applied later, with the same result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.kernels.activations import Gating
from quire.kernels.rotary import Angles
from quire.layers.mixers.mamba2 import Mamba2Mixer, MambaSizes
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_bounds import checked_number
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM, make_attention, make_mlp, make_norm
from quire.models.families.hybrids.mamba_parts import MAMBA_PARTS, fused_mamba, read_step_limits
from quire.models.mixture_config import replaced
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry
from quire.recurrence.state_backend import RecurrentSpec
from quire.recurrence.state_specs import Mamba2Spec

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024}
_IGNORED = ("mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep", "attn_layer_indices")
"""Fields that transformers ignores, and fields that don't change results."""
_TRAINING = ("time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
_NAMES = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".final_layernorm.": ".norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """The config of Falcon-H1. The output scales multiply the blocks' results before the sum with
    the residual stream."""

    mamba: MambaSizes
    mamba_output_scale: float
    attention_output_scale: float
    mlp_output_scale: float
    #: The factor of the gate before its activation.
    gate_scale: float

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        for name in (*_IGNORED, *_TRAINING):
            fields.value(name)
        if not fields.flag("mamba_use_mlp", True):
            raise UnsupportedModelError(
                "config.json: mamba_use_mlp is false, but transformers has no such model"
            )
        bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
        attention_in = fields.number("attention_in_multiplier", 1.0)
        gate_scale, down_scale = _numbers(fields, "mlp_multipliers", 2)
        _refuse_biases(attention_in if bias else 1.0, "attention_bias", "attention_in_multiplier")
        _refuse_biases(gate_scale if mlp_bias else 1.0, "mlp_bias", "mlp_multipliers")
        scale = fields.head_dim() ** -0.5 * fields.number("key_multiplier", 1.0) * attention_in**2
        return cls.read(
            fields,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=mlp_bias,
            attention_scale=scale,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logits_scale=fields.number("lm_head_multiplier", 1.0),
            mamba=_read_mamba(fields),
            mamba_output_scale=fields.number("ssm_out_multiplier", 1.0),
            attention_output_scale=attention_in * fields.number("attention_out_multiplier", 1.0),
            # silu(s g) = s (g sigmoid(s g))
            mlp_output_scale=gate_scale * down_scale,
            gate_scale=gate_scale,
        )

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        return (self.mamba.conv, self.mamba.scan) * self.num_layers

    def why_not_split(self, num_ranks: int) -> str | None:
        return self.mamba.why_not_split(num_ranks) or DecoderConfig.why_not_split(self, num_ranks)

    def share_of(self, rank: int, num_ranks: int) -> Self:
        share = DecoderConfig.share_of(self, rank, num_ranks)
        return replace(share, mamba=self.mamba.share(num_ranks))


def _refuse_biases(factor: float, bias: str, name: str) -> None:
    if factor != 1.0:
        raise UnsupportedModelError(
            f"config.json: {name} has the factor {factor:g} and {bias} is true; no published model"
            " has both"
        )


def _numbers(fields: ConfigFields, name: str, count: int) -> list[float]:
    """Read a list of `count` factors; the default is a list of ones."""
    values = fields.value(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(
            f"config.json: {name} is {shown(values)}, but must be a list of {count} numbers"
        )
    return [checked_number(f"config.json: an entry of {name}", name, value) for value in values]


def _read_mamba(fields: ConfigFields) -> MambaSizes:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("mamba_n_heads", 128)
    expand = fields.integer("mamba_expand", 2)
    inner = fields.optional_integer("mamba_d_ssm") or expand * hidden_size
    size = fields.value("mamba_d_head")
    head_dim = inner // num_heads if size in (None, "auto") else fields.integer("mamba_d_head")
    num_groups = fields.integer("mamba_n_groups", 1)
    if head_dim * num_heads != inner or num_heads % num_groups or head_dim % 16:
        raise CheckpointError(
            f"config.json: mamba_n_heads {num_heads} times mamba_d_head {head_dim} must equal "
            f"mamba_d_ssm, {inner}; mamba_n_heads must be a multiple of mamba_n_groups, "
            f"{num_groups}, and mamba_d_head a multiple of 16"
        )
    least, most = read_step_limits(fields, "time_step_limit")
    scan = Mamba2Spec(
        num_heads, head_dim, fields.integer("mamba_d_state", 256), num_groups, least, most
    )
    input_bias = fields.flag("mamba_proj_bias", False)
    factor = fields.number("ssm_in_multiplier", 1.0)
    _refuse_biases(factor if input_bias else 1.0, "mamba_proj_bias", "ssm_in_multiplier")
    z, x, b, c, dt = (factor * each for each in _numbers(fields, "ssm_multipliers", 5))
    has_norm = fields.flag("mamba_rms_norm", False)
    norm_first = fields.flag("mamba_norm_before_gate", True)
    return MambaSizes(
        hidden_size=hidden_size,
        scan=scan,
        conv_width=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        input_bias=input_bias,
        output_bias=fields.flag("projectors_bias", False),
        norm_eps=fields.number("rms_norm_eps", 1e-5) if has_norm else None,
        gates_first=not norm_first,
        factors=(z, x, b, c, dt),
    )


class FalconH1Layer(nn.Module):
    """Attention, Mamba-2 and an MLP, which all add to the residual stream."""

    def __init__(self, config: FalconH1Config, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.scales = (
            config.mamba_output_scale,
            config.attention_output_scale,
            config.mlp_output_scale,
        )
        self.input_layernorm = make_norm(config, **storage)
        self.mamba = Mamba2Mixer(2 * layer, config.mamba, **storage)
        self.self_attn = make_attention(config, layer, **storage)
        self.post_attention_layernorm = make_norm(config, **storage)
        self.mlp = make_mlp(config, layer, **storage)
        self.mlp.gating = Gating(config.activation, alpha=config.gate_scale)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the layer's results to the stream."""
        normed = stream.normed(self.input_layernorm)
        mamba, attended, mlp = self.scales
        stream.add(self.mamba(normed), mamba)
        stream.add(self.self_attn(normed, angles, attention), attended)
        stream.add(self.mlp(stream.normed(self.post_attention_layernorm)), mlp)


class FalconH1ForCausalLM(DecoderForCausalLM):
    """A decoder of layers with attention and Mamba-2."""

    layer_type = FalconH1Layer


def arrangement(config: FalconH1Config) -> Arrangement:
    """Split Mamba-2's input projection and convolution."""
    return Arrangement(fused=fused_mamba(config.mamba))


def rename(name: str) -> str:
    """Map a tensor's name in the files to the model's."""
    return replaced(name, _NAMES)


ENTRY = ModelEntry(
    FalconH1Config,
    FalconH1ForCausalLM,
    CHECKPOINT_PARTS | MAMBA_PARTS,
    rename=rename,
    arrangement=arrangement,
)
