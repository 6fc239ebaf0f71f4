"""Gemma 2: soft caps, norms before and after blocks, and windows in every other layer.

Source: arXiv:2408.00118. Its differences from Llama:

- scores and logits are capped by tanh; scores are multiplied by 1 / sqrt(query_pre_attn_scalar),
  by default 256;
- norms before and after attention and MLP multiply by 1 + weight;
- embeddings are multiplied by the square root of the hidden size, rounded to the model's dtype;
- the MLP's gate is GELU by tanh; the defaults are a tied head, 4 KV heads and a head size of 256.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_kinds import FULL, SLIDING, read_layer_types, read_windows
from quire.models.layer_shapes import SandwichLayer
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
SHARED_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")


def gemma_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigFields:
    """Read the fields that all Gemma configs share.

    Checkpoints have `hidden_activation` and `hidden_act`. As in transformers, the first is used.
    """
    named = {**SHARED_DEFAULTS, **defaults, **raw}
    named["hidden_act"] = named.pop("hidden_activation")
    fields = ConfigFields(named)
    fields.value("cache_implementation")  # ignored, since it concerns transformers' KV cache
    fields.plain("use_bidirectional_attention", False)
    fields.plain("sliding_window_size", named["sliding_window"])
    return fields


def gemma_parts(fields: ConfigFields) -> dict[str, Any]:
    """Arguments of `DecoderConfig.read` that Gemma 2 and 3 share."""
    attention_bias = fields.flag("attention_bias", False)
    return {
        "activations": ACTIVATIONS,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "norm_offset": 1.0,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "logits_soft_cap": fields.optional_number("final_logit_softcapping"),
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """The config of Gemma 2. `layer_types` names the layers with a window."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = gemma_fields(raw, _DEFAULTS)
        kinds = read_layer_types(fields, lambda layer: FULL if layer % 2 else SLIDING)
        return cls.read(
            fields,
            **gemma_parts(fields),
            attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
            windows=read_windows(fields, kinds),
        )


class GemmaForCausalLM(DecoderForCausalLM):
    """A decoder of layers with norms before and after each block."""

    layer_type: ClassVar[type[nn.Module]] = SandwichLayer

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()


ENTRY = ModelEntry(Gemma2Config, GemmaForCausalLM)
