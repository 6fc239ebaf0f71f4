"""Granite 3 with mixtures of experts: Granite's four multipliers, and experts as MLPs.

By IBM (the model cards of granite-3.0-1b-a400m and 3b-a800m). Its differences from dense Granite:

- every layer's MLP is a mixture; the experts' weights are the softmax over the chosen experts'
  logits;
- all experts' weights are stacked in one tensor in the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.kernels.routing import Scoring
from quire.layers.experts import MoESpec
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.mixture_config import by_layer, read_num_experts, read_router, replaced
from quire.models.model_entry import mixture_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"num_experts_per_tok": 2}
_PARTS = {
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(DecoderConfig):
    """`attention_bias` applies to all linears of attention."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        router = read_router(
            fields,
            read_num_experts(fields, 8),
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
            rounds=True,
        )
        mixture = MoESpec(router=router, intermediate_size=fields.integer("intermediate_size"))
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            attention_scale=fields.number("attention_multiplier", 1.0),
            logits_scale=1.0 / fields.number("logits_scaling", 1.0),
            mixtures=by_layer(fields, mixture, lambda _: True),
        )


def rename(name: str) -> str:
    """Map a tensor's name in the files to its name in the model, or for a stacked tensor to the
    name that `checkpoints.unstacked` expects."""
    return replaced(name, _PARTS)


ENTRY = mixture_entry(GraniteMoeConfig, rename)
