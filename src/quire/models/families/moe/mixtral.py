"""Mixtral: Mistral with mixtures of experts.

Source: arXiv:2401.04088. Its differences from Mistral:

- every layer's MLP is a mixture; the chosen experts' weights are taken from the softmax over all
  experts and divided by their sum, in fp32;
- by default, there is no sliding window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.layers.experts import MoESpec
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.mixture_config import by_layer, read_num_experts, read_router, replaced
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
}
_PARTS = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """`sliding_window` applies to all layers."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        router = read_router(fields, read_num_experts(fields, 8), renormalizes=True)
        mixture = MoESpec(router=router, intermediate_size=fields.integer("intermediate_size"))
        window = fields.optional_integer("sliding_window")
        return cls.read(
            fields,
            windows=(window,) * fields.integer("num_hidden_layers"),
            mixtures=by_layer(fields, mixture, lambda _: True),
        )


def rename(name: str) -> str:
    """Map a tensor's name in the files to the model's."""
    return replaced(name, _PARTS)


ENTRY = mixture_entry(MixtralConfig, rename)
