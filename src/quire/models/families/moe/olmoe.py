"""OLMoE: Llama with mixtures of experts.

Source: arXiv:2409.02060. Its differences from Llama:

- every layer's MLP is a mixture; the chosen experts' weights are taken from the softmax over all
  experts, and divided by their sum only with `norm_topk_prob`;
- q and k are normalised over all their heads together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.layers.experts import MoESpec
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.mixture_config import by_layer, read_num_experts, read_router
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """`attention_bias` applies to all four projections.

    `clip_qkv`, which no published model has, is refused.
    """

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        router = read_router(
            fields,
            read_num_experts(fields, 64),
            renormalizes=fields.flag("norm_topk_prob", False),
            rounds=True,
        )
        mixture = MoESpec(router=router, intermediate_size=fields.integer("intermediate_size"))
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm="width",
            mixtures=by_layer(fields, mixture, lambda _: True),
        )


ENTRY = mixture_entry(OlmoeConfig)
