"""DeepSeek-V2 and V3: latent attention, and mixtures of experts after a few dense layers.

Sources: arXiv:2405.04434, arXiv:2412.19437. Both have shared experts, which all tokens use, and the
router may choose from only a few groups of experts. V2's scores are a softmax. V3's are sigmoids.
V3 adds a bias to the scores, only to choose experts, and divides the experts' weights by their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import UnsupportedModelError
from quire.kernels.routing import RouterSpec
from quire.layers.experts import MoESpec
from quire.models.config_fields import ConfigFields
from quire.models.families.latent.latent_decoder import LatentConfig, latent_entry, latent_fields
from quire.models.mixture_config import (
    by_layer,
    checked_router,
    read_num_experts,
    read_router,
    read_shared_mixture,
    read_sigmoid_router,
)

# transformers' values for fields that a config leaves out.
_V2_DEFAULTS = {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
}
_V3_DEFAULTS = {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_TRAINING = ("aux_loss_alpha", "ep_size", "seq_aux")
_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(LatentConfig):
    """The config of V2. `topk_method` decides whether experts are chosen from a few groups."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = latent_fields(raw, _V2_DEFAULTS)
        fields.choice("scoring_func", "softmax", ("softmax",))
        if fields.flag("norm_topk_prob", False):
            raise UnsupportedModelError(
                "config.json: norm_topk_prob is true, which transformers' DeepSeek-V2 ignores"
            )
        return cls.read_latent(
            fields,
            mlp_bias=fields.flag("mlp_bias", False),
            mixtures=read_mixtures(fields, _read_v2_router(fields), num_dense=0, num_shared=2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(LatentConfig):
    """The config of V3. Layers at the end that predict further tokens (MTP) are not part of the
    decoder, but draft heads (`models.heads.mtp`)."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = latent_fields(raw, _V3_DEFAULTS)
        fields.choice("scoring_func", "sigmoid", ("sigmoid",))
        fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
        return cls.read_latent(
            fields,
            has_pairs=fields.flag("rope_interleave", True),
            mixtures=read_mixtures(fields, read_sigmoid_router(fields), num_dense=3, num_shared=1),
            num_predicting_layers=read_num_predicting_layers(fields, 1),
        )


def read_mixtures(
    fields: ConfigFields, router: RouterSpec, *, num_dense: int, num_shared: int
) -> tuple[MoESpec | None, ...]:
    """Read the mixtures of all layers. Layers before `first_k_dense_replace` are dense.

    `num_dense` and `num_shared` are the default numbers of dense layers and shared experts.
    """
    for name in _TRAINING:
        fields.value(name)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            "config.json: moe_layer_freq is above 1, but transformers has experts in all layers"
            " behind the dense ones"
        )
    first = fields.integer("first_k_dense_replace", num_dense)
    mixture = read_shared_mixture(fields, router, num_shared)
    return by_layer(fields, mixture, lambda layer: layer >= first)


def read_num_predicting_layers(fields: ConfigFields, default: int) -> int:
    """Read the number of layers that predict further tokens. The field has two names."""
    count = fields.integer("num_nextn_predict_layers", default)
    return fields.integer("num_mtp_layers", count)


def _read_v2_router(fields: ConfigFields) -> RouterSpec:
    scale = fields.number("routed_scaling_factor", 1.0)
    num_experts = read_num_experts(fields)
    if fields.choice("topk_method", _GREEDY, (_GREEDY, _BY_GROUP)) == _BY_GROUP:
        return read_router(fields, num_experts, scale=scale)
    for name in ("n_group", "topk_group"):
        fields.value(name)
    return checked_router(
        num_experts=num_experts, top_k=fields.integer("num_experts_per_tok"), scale=scale
    )


V2_ENTRY = latent_entry(DeepseekV2Config)
V3_ENTRY = latent_entry(DeepseekV3Config)
