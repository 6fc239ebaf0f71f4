"""The base of DeepSeek-V2, V3 and GLM-4.7-Flash: decoders with latent attention.

Source: arXiv:2405.04434, section 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch

from quire.attention.interface import AttentionSpec
from quire.errors import CheckpointError, shown
from quire.layers.mixers.latent_attention import LatentAttention, LatentSizes
from quire.layers.rotary import YarnRope
from quire.layers.storage import Storage
from quire.models.checkpoints.arranged import Arrangement, from_pairs
from quire.models.checkpoints.row_selection import IndexedRows, RowSelection, TransposedRows
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import DecoderConfig, ModelConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry

LATENT_PARTS = {
    "gate_up_proj": CHECKPOINT_PARTS["gate_up_proj"],
    "kv_a_proj": ("kv_latent", "k_rope"),
    "q_b_proj": ("q_nope", "q_rope"),
}
"""For each fused linear, the names of its parts, as `arrangement` gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """A decoder with latent attention. head_dim is the size of a head's rotated part."""

    #: The sizes of attention.
    latent: LatentSizes
    #: Whether elements 2i and 2i + 1 rotate together in the files.
    has_pairs: bool = True

    @classmethod
    def read_latent(cls, fields: ConfigFields, **difference: Any) -> Self:
        """Like `DecoderConfig.read`, but also reads the fields of latent attention."""
        sizes = LatentSizes(
            latent=fields.integer("kv_lora_rank", 512),
            nope=fields.integer("qk_nope_head_dim"),
            rope=fields.integer("qk_rope_head_dim"),
            value=fields.integer("v_head_dim"),
            query=fields.optional_integer("q_lora_rank"),
        )
        whole = sizes.nope + sizes.rope
        if fields.value("qk_head_dim") not in (None, whole):
            raise CheckpointError(
                f"config.json: qk_head_dim is {shown(fields.value('qk_head_dim'))}, but "
                f"qk_nope_head_dim and qk_rope_head_dim are {whole} together"
            )
        bias = fields.flag("attention_bias", False)
        config = cls.read(
            fields,
            latent=sizes,
            num_kv_heads=fields.integer("num_attention_heads"),  # keys per head are not computed
            qkv_bias=bias,
            output_bias=bias,
            **difference,
        )
        per_head = sizes.nope + sizes.rope + sizes.value
        inner = sizes.latent + (sizes.query or config.hidden_size)
        config.check_size(config.num_heads * per_head * inner)
        return config

    def attention_spec(self, layer: int) -> AttentionSpec:
        sizes, scale = self.latent, (self.latent.nope + self.latent.rope) ** -0.5
        if isinstance(self.rope, YarnRope):
            scale *= self.rope.score_scale
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=sizes.latent + sizes.rope,
            scale=scale,
            value_dim=sizes.latent,
        )

    def share_of(self, rank: int, num_ranks: int) -> Self:
        share = DecoderConfig.share_of(self, rank, num_ranks)
        return replace(share, latent=replace(self.latent, first_head=rank * share.num_heads))


def latent_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigFields:
    """Read a config whose head_dim is the size of a head's rotated part.

    `defaults` are transformers' values for fields that the config leaves out. Raises
    CheckpointError for another head_dim.
    """
    given = {"qk_rope_head_dim": 64, **defaults, **raw}
    size = given["qk_rope_head_dim"]
    if raw.get("head_dim") not in (None, size):
        raise CheckpointError(
            f"config.json: head_dim is {shown(raw['head_dim'])}, but with latent attention it "
            f"can only repeat qk_rope_head_dim, {shown(size)}"
        )
    return ConfigFields({**given, "head_dim": size})


def make_latent_attention(
    config: LatentConfig, layer: int, **storage: Unpack[Storage]
) -> LatentAttention:
    """Build a layer's attention."""
    return LatentAttention(
        layer,
        config.hidden_size,
        config.num_heads,
        config.latent,
        has_bias=config.qkv_bias,
        **storage,
    )


class LatentLayer(DecoderLayer):
    """Latent attention and an MLP. Each reads the normed residual stream and adds to the stream."""

    attention_type = staticmethod(make_latent_attention)


class LatentForCausalLM(DecoderForCausalLM):
    """A decoder of layers with latent attention."""

    layer_type = LatentLayer


def arrangement(config: LatentConfig) -> Arrangement:
    """Split the fused linears of queries, latents and heads, and reorder rotated elements as
    `kernels.rotary` expects them."""
    sizes, num_heads = config.latent, config.num_heads
    turned = from_pairs(1, sizes.rope, sizes.rope) if config.has_pairs else None
    queries = _queries(num_heads, sizes, turned)
    return Arrangement(
        fused={"kv_a_proj_with_mqa": {"kv_latent": sizes.latent, "k_rope": sizes.rope}},
        order={} if turned is None else {"k_rope": turned},
        selected={
            "q_proj" if sizes.query is None else "q_b_proj": queries,
            "kv_b_proj": _heads(num_heads, sizes),
        },
    )


def _queries(
    num_heads: int, sizes: LatentSizes, turned: torch.Tensor | None
) -> Mapping[str, RowSelection]:
    """The rows of all heads' unrotated elements (q_nope) and of their rotated elements (q_rope)."""
    rows = torch.arange(num_heads * (sizes.nope + sizes.rope)).view(num_heads, -1)
    nope, rope = rows[:, : sizes.nope], rows[:, sizes.nope :]
    if turned is not None:
        rope = rope[:, turned]
    return {
        "q_nope": IndexedRows(nope.flatten(), rows.numel()),
        "q_rope": IndexedRows(rope.flatten(), rows.numel()),
    }


def _heads(num_heads: int, sizes: LatentSizes) -> Mapping[str, RowSelection]:
    """For each head, the projections from the latent to its keys (transposed) and to its values."""
    found: dict[str, RowSelection] = {}
    total = num_heads * (sizes.nope + sizes.value)
    for head in range(num_heads):
        first = head * (sizes.nope + sizes.value)
        values = torch.arange(first + sizes.nope, first + sizes.nope + sizes.value)
        found[f"k_up.{head}"] = TransposedRows(first, sizes.nope, total)
        found[f"v_up.{head}"] = IndexedRows(values, total)
    return found


def latent_entry(config: type[ModelConfig]) -> ModelEntry:
    """The entry of a mixture of experts with latent attention."""
    return ModelEntry(
        config,
        LatentForCausalLM,
        LATENT_PARTS,
        arrangement=arrangement,
        unstack=UnstackedCheckpoint,
    )
