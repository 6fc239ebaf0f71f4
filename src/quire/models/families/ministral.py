"""Ministral and Ministral 3: Mistral with windows in some layers, or with growing queries.

Sources: the model cards of Ministral-8B-Instruct-2410 and Ministral-3-8B-Base-2512. Their
differences from Mistral:

- Ministral names the layers with and without a window;
- Ministral 3 multiplies queries by a factor that grows with their position, as Llama 4 does:
  1 + beta ln(1 + floor(position / length)). The rope parameters `llama_4_scaling_beta` and
  `original_max_position_embeddings` are beta and length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import CheckpointError
from quire.layers.position_scale import QueryGrowth
from quire.models.config import DecoderConfig
from quire.models.config_bounds import checked_integer, checked_number
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_kinds import FULL, SLIDING, read_layer_types, read_windows
from quire.models.model_entry import ModelEntry
from quire.models.rope_config import read_rope_parameters

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
_DEFAULTS_3 = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_LENGTH = "original_max_position_embeddings"
_ROPE_3: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MinistralConfig(DecoderConfig):
    """The config of Ministral. `layer_types` names the layers with the window, by default all."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        default = FULL if fields.value("sliding_window") is None else SLIDING
        kinds = read_layer_types(fields, lambda _: default)
        return cls.read(fields, windows=read_windows(fields, kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """The config of Ministral 3. `sliding_window` applies to all layers."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        rope = read_rope_parameters(ConfigFields(raw)) or dict(_ROPE_3)
        beta, length = rope.pop("llama_4_scaling_beta", None), rope.get(_LENGTH)
        rope.pop("max_position_embeddings", None)  # repeats the config's field
        if beta is None or length is None:
            raise CheckpointError(
                "config.json: the rope parameters of Ministral 3 lack llama_4_scaling_beta or "
                f"{_LENGTH}, by which its queries grow; they must be there"
            )
        growth = QueryGrowth(
            checked_number("config.json: llama_4_scaling_beta", "llama_4_scaling_beta", beta),
            checked_integer(f"config.json: {_LENGTH}", _LENGTH, length),
        )
        named = {**_DEFAULTS_3, **raw, "rope_scaling": None, "rope_parameters": rope}
        fields = ConfigFields(named)
        window = fields.optional_integer("sliding_window")
        windows = (window,) * fields.integer("num_hidden_layers")
        return cls.read(fields, windows=windows, query_growth=growth)


ENTRY = ModelEntry(MinistralConfig, DecoderForCausalLM)
ENTRY_3 = ModelEntry(Ministral3Config, DecoderForCausalLM)
