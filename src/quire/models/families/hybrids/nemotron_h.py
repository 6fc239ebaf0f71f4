"""Nemotron-H: a pattern of layers that are either Mamba-2, attention or an MLP.

Source: arXiv:2504.03624. Its differences from Llama:

- a layer has one norm and one block; most blocks are `layers.mixers.mamba2`, in which the gate
  multiplies before the norm, and the norm is computed by group;
- attention has no positions; MLPs have no gate, and square the result of ReLU;
- norms multiply by their weight before the result is rounded to the model's dtype.

Models with experts, which have no gate either, are refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.kernels.activations import HF_ACTIVATIONS
from quire.kernels.rotary import Angles
from quire.layers.encoder import FeedForward
from quire.layers.mixers.mamba2 import Mamba2Mixer, MambaSizes
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM, make_attention, make_norm
from quire.models.families.hybrids.mamba_parts import MAMBA_PARTS, fused_mamba, read_step_limits
from quire.models.mixture_config import replaced
from quire.models.model_entry import QKV_PARTS, ModelEntry
from quire.recurrence.state_backend import RecurrentSpec
from quire.recurrence.state_specs import Mamba2Spec

STATE, FULL, DENSE = "linear_attention", "full_attention", "mlp"
_LETTERS = {"M": STATE, "*": FULL, "-": DENSE, "E": "moe"}
_OLD_NAMES = {"mamba": STATE, "attention": FULL}
# transformers' values for fields that a config leaves out.
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504}
_IGNORED = (
    *("num_logits_to_keep", "use_mamba_kernels", "chunk_size", "mamba_chunk_size", "expand"),
    *("mamba_expand", "rescale_prenorm_residual", "time_step_floor", "time_step_max"),
    *("time_step_rank", "hidden_dropout", "sliding_window"),
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group", "topk_group"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
    *("num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob", "output_router_logits"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers"),
    *("num_query_groups", "attention_head_dim", "mlp_layer_types", "mamba_dt_max"),
)
"""Fields that transformers ignores, or that only concern training, experts or further tokens."""
_LEAST_STEP = 1e-3
_NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """The config of a decoder whose layers have one block each."""

    #: STATE, FULL or DENSE for each layer.
    layer_types: tuple[str, ...]
    mamba: MambaSizes

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        kinds = read_kinds(raw)
        given = {**_DEFAULTS, **raw, "num_hidden_layers": len(kinds)}
        given["rms_norm_eps"] = raw.get("layer_norm_epsilon") or 1e-5
        fields = ConfigFields(given)
        for name in ("layers_block_type", "layer_types", "hybrid_override_pattern", *_IGNORED):
            fields.value(name)
        fields.value("layer_norm_epsilon")
        fields.choice("mamba_hidden_act", "silu", ("silu",))
        for name in ("residual_in_fp32", "mamba_proj_bias", "attention_bias"):
            if fields.flag(name, False):
                raise UnsupportedModelError(
                    f"config.json: {name} is true, which transformers ignores"
                )
        fields.choice("mamba_ssm_cache_dtype", "float32", ("float32",))
        act = fields.choice("mlp_hidden_act", "relu2", tuple(HF_ACTIVATIONS))
        return cls.read(
            fields,
            mlp_bias=fields.flag("mlp_bias", False),
            activation=HF_ACTIVATIONS[act],
            norm_offset=0.0,
            layer_ropes=(None,) * len(kinds),
            layer_types=kinds,
            mamba=_read_mamba(fields),
        )

    @property
    def attention_layers(self) -> Sequence[int]:
        return [layer for layer, kind in enumerate(self.layer_types) if kind == FULL]

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        return (self.mamba.conv, self.mamba.scan) * self.layer_types.count(STATE)

    def why_not_split(self, num_ranks: int) -> str | None:
        return self.mamba.why_not_split(num_ranks) or DecoderConfig.why_not_split(self, num_ranks)

    def share_of(self, rank: int, num_ranks: int) -> Self:
        share = DecoderConfig.share_of(self, rank, num_ranks)
        return replace(share, mamba=self.mamba.share(num_ranks))


def read_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the kinds of layers from a list, or from a pattern with a letter for each layer."""
    kinds: Any = raw.get("layers_block_type") or raw.get("layer_types")
    if kinds is None:
        pattern = raw.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or {*pattern} - _LETTERS.keys():
            raise CheckpointError(
                f"config.json: hybrid_override_pattern is {shown(pattern)}, but must have one of "
                f"{', '.join(_LETTERS)} for each layer; or list the kinds in layers_block_type"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError(
            f"config.json: layers_block_type is {shown(kinds)}, but must be a list of kinds"
        )
    kinds = [_OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in (STATE, FULL, DENSE):
            raise UnsupportedModelError(
                f"config.json: layers_block_type has {shown(kind)}; understood are {STATE}, {FULL} "
                f"and {DENSE}"
            )
    return tuple(kinds)


def _read_mamba(fields: ConfigFields) -> MambaSizes:
    num_heads, head_dim = (
        fields.integer("mamba_num_heads", 128),
        fields.integer("mamba_head_dim", 64),
    )
    num_groups = fields.integer("mamba_n_groups", fields.integer("n_groups", 8))
    if num_heads % num_groups:
        raise CheckpointError(
            f"config.json: mamba_num_heads is {num_heads}, but must be a multiple of n_groups, "
            f"{num_groups}"
        )
    _check_steps(fields)
    bias = fields.flag("use_bias", False)
    conv_bias = fields.flag("mamba_conv_bias", fields.flag("use_conv_bias", True))
    return MambaSizes(
        hidden_size=fields.integer("hidden_size"),
        scan=Mamba2Spec(num_heads, head_dim, fields.integer("ssm_state_size", 128), num_groups),
        conv_width=fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4)),
        conv_bias=conv_bias,
        input_bias=bias,
        output_bias=bias,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        gates_first=True,
    )


def _check_steps(fields: ConfigFields) -> None:
    """Refuse bounds on the time step that only some classes of transformers and NVIDIA apply.

    transformers applies the lower bound to prompts, but not to decoding. In published models it is
    too small to matter, and is ignored.
    """
    for name in ("time_step_limit", "mamba_dt_limit"):
        if read_step_limits(fields, name) != (0.0, math.inf):
            raise UnsupportedModelError(
                f"config.json: {name} is {shown(fields.value(name))}, which transformers ignores"
            )
    for name in ("time_step_min", "mamba_dt_min"):
        least = fields.number(name, _LEAST_STEP)
        if least > _LEAST_STEP:
            raise UnsupportedModelError(
                f"config.json: {name} is {least:g}, which bounds the steps of prompts alone in "
                f"transformers; understood are numbers up to {_LEAST_STEP:g}"
            )


class NemotronHLayer(nn.Module):
    """One block, which reads the normed residual stream and adds its result to the stream."""

    def __init__(self, config: NemotronHConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.kind = config.layer_types[layer]
        self.norm = make_norm(config, **storage)
        self.mixer: nn.Module
        if self.kind == STATE:
            first = 2 * config.layer_types[:layer].count(STATE)
            self.mixer = Mamba2Mixer(first, config.mamba, **storage)
        elif self.kind == FULL:
            self.mixer = make_attention(config, layer, **storage)
        else:
            self.mixer = FeedForward(
                config.hidden_size,
                config.intermediate_size,
                activation=config.activation,
                bias=config.mlp_bias,
                **storage,
            )

    def forward(
        self, stream: ResidualStream, angles: Angles | None, attention: AttentionCall
    ) -> None:
        """Add the block's result to the stream."""
        normed = stream.normed(self.norm)
        if self.kind == FULL:
            stream.add(self.mixer(normed, angles, attention))
        else:
            stream.add(self.mixer(normed))


class NemotronHForCausalLM(DecoderForCausalLM):
    """A decoder of layers with one block each."""

    layer_type = NemotronHLayer


def arrangement(config: NemotronHConfig) -> Arrangement:
    """Split Mamba-2's input projection and convolution."""
    return Arrangement(fused=fused_mamba(config.mamba))


def rename(name: str) -> str | None:
    """Map a tensor's name in the files to the model's. Returns None for layers that predict further
    tokens (MTP)."""
    return None if name.startswith("mtp.") else replaced(name, _NAMES)


ENTRY = ModelEntry(
    NemotronHConfig,
    NemotronHForCausalLM,
    QKV_PARTS | MAMBA_PARTS,
    rename=rename,
    arrangement=arrangement,
)
