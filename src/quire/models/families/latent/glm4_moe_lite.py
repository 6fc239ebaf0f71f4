"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes.

By Zhipu (model card of GLM-4.7-Flash). The list `mlp_layer_types` names the dense layers. If it is
missing, only the first layer is dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.models.config_fields import ConfigFields
from quire.models.families.latent.deepseek import read_num_predicting_layers
from quire.models.families.latent.latent_decoder import LatentConfig, latent_entry, latent_fields
from quire.models.mixture_config import by_layer, read_shared_mixture, read_sigmoid_router

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
_DENSE, _SPARSE = "dense", "sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeLiteConfig(LatentConfig):
    """The config of GLM-4.7-Flash. Layers that predict further tokens (MTP) are not part of the
    decoder, but draft heads (`models.heads.mtp`)."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = latent_fields(raw, _DEFAULTS)
        fields.choice("scoring_func", "sigmoid", ("sigmoid",))
        fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
        kinds = _read_kinds(fields)
        mixture = read_shared_mixture(fields, read_sigmoid_router(fields), 1)
        return cls.read_latent(
            fields,
            has_pairs=fields.flag("rope_interleave", True),
            mixtures=by_layer(fields, mixture, lambda layer: kinds[layer] == _SPARSE),
            num_predicting_layers=read_num_predicting_layers(fields, 0),
        )


def _read_kinds(fields: ConfigFields) -> list[str]:
    """Read the kind of each layer's MLP."""
    num_layers, kinds = fields.integer("num_hidden_layers"), fields.value("mlp_layer_types")
    num_dense = fields.integer("first_k_dense_replace", 1)
    if kinds is None:
        if num_dense != 1:
            raise UnsupportedModelError(
                f"config.json: first_k_dense_replace is {num_dense}, which transformers ignores; "
                "mlp_layer_types says which layers are dense"
            )
        return [_DENSE] + [_SPARSE] * (num_layers - 1)
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {_DENSE, _SPARSE}:
        raise CheckpointError(
            f"config.json: mlp_layer_types is {shown(kinds)}, but must be a list of "
            f"num_hidden_layers, {num_layers}, of {_DENSE!r} and {_SPARSE!r}"
        )
    return kinds


ENTRY = latent_entry(Glm4MoeLiteConfig)
