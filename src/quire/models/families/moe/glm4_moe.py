"""GLM-4.5 to 4.7: DeepSeek-V3's mixtures of experts with grouped-query attention.

Source: arXiv:2508.06471. Its differences from Llama:

- after the first `first_k_dense_replace` layers, MLPs are mixtures with shared experts, which all
  tokens use; scores are sigmoids of fp32 logits, plus a bias that only affects the choice of
  experts; weights are divided by their sum and scaled;
- part of each head rotates, by default half of it;
- biases of q, k and v, and norms on the heads of q and k, are options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.mixture_config import by_layer, read_shared_mixture, read_sigmoid_router
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """The config. The last `num_nextn_predict_layers` layers, which predict further tokens (MTP),
    are not part of the decoder, but draft heads (`models.heads.mtp`)."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        mixture = read_shared_mixture(fields, read_sigmoid_router(fields), 1)
        num_dense = fields.integer("first_k_dense_replace", 1)
        return cls.read(
            fields,
            partial_rotary=0.5,
            num_predicting_layers=fields.integer("num_nextn_predict_layers", 1),
            qkv_bias=fields.flag("attention_bias", False),
            qk_norm="head" if fields.flag("use_qk_norm", False) else None,
            mixtures=by_layer(fields, mixture, lambda layer: layer >= num_dense),
        )


ENTRY = mixture_entry(Glm4MoeConfig)
