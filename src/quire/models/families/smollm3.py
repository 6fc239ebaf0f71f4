"""SmolLM3: Llama with some layers without positions.

Source: https://huggingface.co/blog/smollm3; arXiv:2501.18795 for layers without rotation. Its
differences from Llama:

- q and k of some layers, by default every fourth, are not rotated;
- those layers may have a sliding window;
- the defaults are a tied head and 4 KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import CheckpointError, shown
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_kinds import FULL, SLIDING, read_layer_types, read_windows
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
_UNUSED = ("max_window_layers", "pretraining_tp")  # transformers' model ignores them, too


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """The config of SmolLM3. `no_rope_layers` has 1 for a layer with rotation, 0 for one
    without."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        for name in _UNUSED:
            fields.value(name)
        rotates = _read_rotating_layers(fields)
        slides = fields.flag("use_sliding_window", False)
        slides = slides and fields.value("sliding_window") is not None
        kinds = read_layer_types(
            fields, lambda layer: SLIDING if slides and not rotates[layer] else FULL
        )
        windows = read_windows(fields, kinds) if slides else (None,) * len(kinds)
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            windows=windows,
            layer_ropes=tuple(0 if each else None for each in rotates),
        )


def _read_rotating_layers(fields: ConfigFields) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    listed = fields.value("no_rope_layers")
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(listed, list) and len(listed) >= num_layers
    if not is_list or any(each not in (0, 1) for each in listed):
        raise CheckpointError(
            f"config.json: no_rope_layers is {shown(listed)}, but must be a list of 0 or 1 for each"
            f" of num_hidden_layers, {num_layers}"
        )
    return tuple(bool(each) for each in listed[:num_layers])


ENTRY = ModelEntry(SmolLM3Config, DecoderForCausalLM)
