"""OLMo 2: Llama with norms behind attention and MLP.

Source: arXiv:2501.00656. Its differences from Llama:

- norms behind attention and MLP, whose results are added to the residual stream, and none before;
- q and k normalised over all their heads together;
- norms whose weight multiplies before the result is rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_shapes import PostNormLayer

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """`attention_bias` is of all four projections; the MLP has none."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        attention_bias = fields.flag("attention_bias", False)
        return cls.read(
            fields,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm="width",
            norm_offset=0.0,
        )


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Of layers with norms behind."""

    layer_type = PostNormLayer
