"""OLMo 2: Llama with norms after attention and MLP.

Source: arXiv:2501.00656. Its differences from Llama:

- norms come after attention and MLP instead of before; the norm's result is added to the stream;
- q and k are normalised over all their heads together;
- norms multiply by their weight before the result is rounded to the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_shapes import PostNormLayer
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """`attention_bias` applies to all four projections; the MLP has no biases."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm="width",
            norm_offset=0.0,
        )


class Olmo2ForCausalLM(DecoderForCausalLM):
    """A decoder of layers with norms after each block."""

    layer_type = PostNormLayer


ENTRY = ModelEntry(Olmo2Config, Olmo2ForCausalLM)
