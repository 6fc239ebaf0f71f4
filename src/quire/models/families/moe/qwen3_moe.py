"""Qwen3 with mixtures of experts: Qwen3's attention, and experts as MLPs.

Source: arXiv:2505.09388. Its differences from dense Qwen3:

- the MLP of every `decoder_sparse_step`-th layer is a mixture, except for `mlp_only_layers`;
  the chosen experts' weights are taken from the softmax over all experts, and divided by their sum
  with `norm_topk_prob`;
- by default, the head size is the hidden size divided by the number of heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.layers.experts import MoESpec
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.mixture_config import by_sparse_step, read_num_experts, read_router
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}

_OF_OTHERS = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
"""Fields of Qwen3-Coder's configs that transformers ignores -> their only supported values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """The config of Qwen3-MoE. With `use_sliding_window`, all layers have the window."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        window = fields.optional_integer("sliding_window")
        fields.value("max_window_layers")  # in published configs, but ignored by transformers
        for name, value in _OF_OTHERS.items():
            fields.plain(name, value)
        if not fields.flag("use_sliding_window", False):
            window = None
        router = read_router(
            fields,
            read_num_experts(fields, 128),
            renormalizes=fields.flag("norm_topk_prob", False),
            rounds=True,
        )
        mixture = MoESpec(router=router, intermediate_size=fields.integer("moe_intermediate_size"))
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm="head",
            windows=(window,) * fields.integer("num_hidden_layers"),
            mixtures=by_sparse_step(fields, mixture),
        )


ENTRY = mixture_entry(Qwen3MoeConfig)
