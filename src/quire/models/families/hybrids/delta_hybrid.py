"""The base of Qwen3-Next and Qwen3.5: three Gated DeltaNet layers for each gated attention layer.

By Alibaba (model cards of Qwen3-Next-80B-A3B and Qwen3.5). The differences from Qwen3:

- most layers are `layers.mixers.gated_delta_net`; the others have attention with a gated output;
- a quarter of each head of q and k rotates;
- norms multiply by 1 + weight, except for DeltaNet's own norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.rotary import Angles
from quire.layers.experts import MoESpec
from quire.layers.mixers.gated_delta_net import DeltaNetSizes, GatedDeltaNet
from quire.layers.residual import ResidualStream
from quire.layers.storage import Storage
from quire.models.checkpoints.arranged import Arrangement
from quire.models.checkpoints.row_selection import IndexedRows, RowSelection
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM, make_attention, make_mlp, make_norm
from quire.models.layer_kinds import FULL, read_layer_types
from quire.models.mixture_config import read_num_experts, read_router, replaced
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry
from quire.recurrence.state_backend import RecurrentSpec
from quire.recurrence.state_specs import GatedDeltaSpec

LINEAR = "linear_attention"
DELTA_NET_PARTS = {
    "in_proj": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "conv_taps": ("q_taps", "k_taps", "v_taps"),
}
"""For each fused linear, the names of its parts, as the families' arrangements give them."""
PARTIAL_ROTARY = 0.25
_NAMES = {".mlp.shared_expert.": ".mlp.shared_experts."}
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4}
MOE_DEFAULTS = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHybridConfig(DecoderConfig):
    """The config of a decoder with Gated DeltaNet and gated attention."""

    #: LINEAR or FULL for each layer.
    layer_types: tuple[str, ...]
    #: The gated delta rule of LINEAR layers.
    delta: GatedDeltaSpec
    #: The width of the convolutions of LINEAR layers, in tokens.
    conv_width: int

    @classmethod
    def read_hybrid(cls, fields: ConfigFields, **difference: Any) -> Self:
        """Like `DecoderConfig.read`, but also reads the fields that these families share."""
        # First, find the kinds of layers.
        interval = fields.integer("full_attention_interval", 4)
        kinds = read_layer_types(
            fields, lambda layer: LINEAR if (layer + 1) % interval else FULL, (LINEAR, FULL)
        )
        # Then, refuse unsupported options.
        fields.choice("mamba_ssm_dtype", "float32", ("float32",))
        for name in ("max_window_layers", "sliding_window"):
            fields.value(name)  # ignored, since none of these models has windows
        if fields.flag("use_sliding_window", False):
            raise UnsupportedModelError(
                "config.json: use_sliding_window is true, which transformers ignores"
            )
        if not fields.flag("attn_output_gate", True):
            raise UnsupportedModelError(
                "config.json: attn_output_gate is false, but transformers has no such model"
            )
        # Last, read the other fields.
        config = cls.read(
            fields,
            partial_rotary=PARTIAL_ROTARY,
            attention_bias=fields.flag("attention_bias", False),
            has_attention_gate=True,
            qk_norm="head",
            norm_offset=1.0,
            layer_types=kinds,
            delta=read_delta(fields),
            conv_width=fields.integer("linear_conv_kernel_dim", 4),
            **difference,
        )
        config.check_size(config.hidden_size * 4 * sum(config.delta_net.part_sizes))
        return config

    @property
    def delta_net(self) -> DeltaNetSizes:
        """The sizes of a LINEAR layer."""
        return DeltaNetSizes(self.hidden_size, self.delta, self.conv_width)

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        sizes = self.delta_net
        return (sizes.conv, sizes.delta) * self.layer_types.count(LINEAR)

    @property
    def attention_layers(self) -> Sequence[int]:
        return [layer for layer, kind in enumerate(self.layer_types) if kind == FULL]

    def recurrent_index(self, layer: int) -> int:
        """The index in `recurrent_specs` of a LINEAR layer's first state."""
        return 2 * self.layer_types[:layer].count(LINEAR)

    def why_not_split(self, num_ranks: int) -> str | None:
        if self.delta.num_k_heads % num_ranks:
            return (
                f"the model's {self.delta.num_k_heads} key heads of linear attention can't be "
                "divided equally"
            )
        return DecoderConfig.why_not_split(self, num_ranks)

    def share_of(self, rank: int, num_ranks: int) -> Self:
        delta = replace(
            self.delta,
            num_k_heads=self.delta.num_k_heads // num_ranks,
            num_v_heads=self.delta.num_v_heads // num_ranks,
        )
        return replace(DecoderConfig.share_of(self, rank, num_ranks), delta=delta)


def read_delta(fields: ConfigFields) -> GatedDeltaSpec:
    """Read the numbers and sizes of the heads of linear attention."""
    num_k_heads = fields.integer("linear_num_key_heads", 16)
    num_v_heads = fields.integer("linear_num_value_heads", 32)
    if num_v_heads % num_k_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads is {num_v_heads}, but must be a multiple of "
            f"linear_num_key_heads, {num_k_heads}"
        )
    sizes = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    return GatedDeltaSpec(num_k_heads, num_v_heads, *sizes)


class DeltaHybridLayer(nn.Module):
    """A mixer and an MLP. Each reads the normed residual stream and adds to the stream."""

    def __init__(self, config: DeltaHybridConfig, layer: int, **storage: Unpack[Storage]) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, **storage)
        self.linear_attn: GatedDeltaNet | None = None
        if config.layer_types[layer] == LINEAR:
            self.linear_attn = GatedDeltaNet(
                config.recurrent_index(layer), config.delta_net, config.rms_norm_eps, **storage
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
        if self.linear_attn is not None:
            stream.add(self.linear_attn(normed))
        else:
            stream.add(self.self_attn(normed, angles, attention))
        stream.add(self.mlp(stream.normed(self.post_attention_layernorm)))


class DeltaHybridForCausalLM(DecoderForCausalLM):
    """A decoder of recurrent layers and attention layers."""

    layer_type = DeltaHybridLayer


def read_mixture(fields: ConfigFields, *, num_experts: int, renormalizes: bool) -> MoESpec:
    """Read a mixture of experts with a gated shared expert. All tokens use the shared expert.

    `num_experts` is the default number of experts.
    """
    router = read_router(
        fields, read_num_experts(fields, num_experts), renormalizes=renormalizes, rounds=True
    )
    return MoESpec(
        router=router,
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def rename(name: str) -> str | None:
    """Map a tensor's name in the files to the model's. Returns None for layers that predict further
    tokens (MTP)."""
    return None if name.startswith("mtp.") else replaced(name, _NAMES)


def conv_parts(config: DeltaHybridConfig) -> dict[str, int]:
    """Number of channels of each part (q, k, v) of the convolution."""
    keys, _, values = config.delta_net.part_sizes
    return {"conv.q_taps": keys, "conv.k_taps": keys, "conv.v_taps": values}


def gated_query(config: DeltaHybridConfig) -> dict[str, RowSelection]:
    """The rows of q and of its gate. In the files, they alternate by head."""
    size = 2 * config.num_heads * config.head_dim
    query, gate = torch.arange(size).view(config.num_heads, 2, config.head_dim).unbind(1)
    return {
        "q_proj": IndexedRows(query.flatten(), size),
        "gate_proj": IndexedRows(gate.flatten(), size),
    }


def delta_hybrid_entry(
    config: type[ModelConfig], arrangement: Callable[[Any], Arrangement]
) -> ModelEntry:
    """The entry of Qwen3-Next or Qwen3.5."""
    return ModelEntry(
        config,
        DeltaHybridForCausalLM,
        CHECKPOINT_PARTS | DELTA_NET_PARTS,
        rename=rename,
        arrangement=arrangement,
        unstack=UnstackedCheckpoint,
    )
