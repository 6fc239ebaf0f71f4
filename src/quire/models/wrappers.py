"""Multimodal models: finds the language model in their configs and checkpoints.

In config.json, the language model's fields are in `text_config` or, for old models, at the top
level. In the files, the names of its tensors have another prefix than in a text-only model. Tensors
for images and sound are left out here. `models.vision` loads those of towers.

To add a multimodal model, add a line in `WRAPPERS`, and another line in `TEXT_MODELS` if its
language model has its own type. Called by `models.registry`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.models.checkpoints.renamed import RenamedCheckpoint
from quire.models.checkpoints.source import CheckpointSource
from quire.models.checkpoints.transposed import TransposedCheckpoint, swapped_experts
from quire.models.config_fields import ORIGIN, ROPE_FORMS
from quire.models.rope_config import of_one_axis


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal architecture."""

    #: Prefixes of tensors outside the language model, after an optional "model.".
    unused: tuple[str, ...]
    #: Whether embedding and head are tied if the config has no field about it.
    is_tied: bool = False
    #: The language model's type in configs without text_config; None if all configs have one.
    flat_text: str | None = None
    #: Whether experts are stacked, in one of the layouts of `checkpoints.transposed`.
    has_stacked_experts: bool = False
    #: Fields of a text_config that describe code of the training, and that no class of the language
    #: model reads, though other models have fields of these names.
    unread: tuple[str, ...] = ()

    def open(self, checkpoint: CheckpointSource, hidden_size: int) -> CheckpointSource:
        """The language model's tensors, under the names of a text-only model."""
        renamed = RenamedCheckpoint(checkpoint, self.rename)
        if not self.has_stacked_experts:
            return renamed
        return TransposedCheckpoint(renamed, swapped_experts(renamed, hidden_size))

    def rename(self, name: str) -> str | None:
        """Map a tensor's name to its name in the language model; None for a tensor outside it."""
        if name.removeprefix("model.").startswith(self.unused):
            return None
        return language_model_name(name)


def language_model_name(name: str) -> str:
    """Map a tensor's name in any checkpoint of the language model to the language model's name."""
    for prefix, ours in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


_TEXT_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "model.",
}
"""The language model's prefixes, by version of transformers. Very old files have none."""

_PROJECTED = ("vision_tower.", "multi_modal_projector.")
_EMBEDDED = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
_QWEN = ("visual.", "mtp.")
_IDEFICS3 = Wrapper(
    ("vision_model.", "connector."),
    unread=("perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler"),
)

WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(_PROJECTED, is_tied=True),
    "Gemma4ForConditionalGeneration": Wrapper(_EMBEDDED, is_tied=True),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "InternVLForConditionalGeneration": Wrapper(_PROJECTED, is_tied=True),
    "Lfm2VlForConditionalGeneration": Wrapper(_PROJECTED, is_tied=True),
    "LlavaForConditionalGeneration": Wrapper(_PROJECTED),
    "LlavaNextForConditionalGeneration": Wrapper((*_PROJECTED, "image_newline")),
    "LlavaOnevisionForConditionalGeneration": Wrapper((*_PROJECTED, "image_newline")),
    "Mistral3ForConditionalGeneration": Wrapper(_PROJECTED, is_tied=True),
    "Qwen2VLForConditionalGeneration": Wrapper(_QWEN, flat_text="qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(_QWEN, flat_text="qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": Wrapper(_QWEN),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(_QWEN, has_stacked_experts=True),
    "Qwen3_5ForConditionalGeneration": Wrapper(_QWEN),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(_QWEN),
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
"""Multimodal architectures by their name in config.json."""


@dataclass(frozen=True, slots=True)
class TextModelType:
    """A type of language model in multimodal models."""

    #: The name in `registry.MODELS`.
    architecture: str
    #: transformers' defaults of required fields, which a text_config may omit.
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: Fixed values of its class in transformers, which replace fields of the text_config.
    fields: Mapping[str, Any] = field(default_factory=dict)


def _sizes(*sizes: int) -> dict[str, int]:
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "max_position_embeddings"),
    )
    return dict(zip(names, sizes, strict=True))


TEXT_MODELS: dict[str, TextModelType] = {
    "gemma3_text": TextModelType("Gemma3ForCausalLM", _sizes(262208, 2304, 9216, 26, 8, 131072)),
    "gemma4_text": TextModelType("Gemma4ForCausalLM", _sizes(262144, 2304, 9216, 30, 8, 131072)),
    "lfm2": TextModelType("Lfm2ForCausalLM", _sizes(65536, 2560, 12288, 32, 32, 128000)),
    "llama": TextModelType("LlamaForCausalLM", _sizes(32000, 4096, 11008, 32, 32, 2048)),
    "ministral3": TextModelType(
        "Ministral3ForCausalLM", _sizes(131072, 4096, 14336, 34, 32, 262144)
    ),
    "mistral": TextModelType("MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32, 131072)),
    "qwen2": TextModelType("Qwen2ForCausalLM", _sizes(151936, 4096, 22016, 32, 32, 32768)),
    "qwen2_5_vl_text": TextModelType("Qwen2ForCausalLM"),
    "qwen2_vl_text": TextModelType("Qwen2ForCausalLM"),
    "qwen3": TextModelType("Qwen3ForCausalLM"),
    "qwen3_5_moe_text": TextModelType("Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": TextModelType("Qwen3_5ForCausalLM"),
    "qwen3_vl_moe_text": TextModelType("Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}),
    "qwen3_vl_text": TextModelType("Qwen3ForCausalLM"),
}
"""Language models by the `model_type` of the text_config."""

_DTYPES = ("dtype", "torch_dtype")


def unwrapped(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(language model's config, wrapper's name), or (`raw`, None) for a text-only model.

    Raises CheckpointError, and UnsupportedModelError for an unsupported language model.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None:
        return dict(raw), None
    text = raw.get("text_config")
    if text is None and wrapper.flat_text is not None:
        text = _without_images(raw) | {"model_type": wrapper.flat_text}
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json of {name} has the text_config {shown(text)}, but it must be an object, "
            "which describes the language model"
        )
    kind = TEXT_MODELS.get(str(text.get("model_type")))
    if kind is None:
        raise UnsupportedModelError(
            f"config.json of {name}: the model_type of its text_config is "
            f"{shown(text.get('model_type'))}, but served are {', '.join(TEXT_MODELS)}"
        )
    return _text_fields(raw, text, wrapper, kind), name


def _text_fields(
    raw: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper, kind: TextModelType
) -> dict[str, Any]:
    found: dict[str, Any] = {
        **{name: raw[name] for name in ORIGIN if name in raw},
        **kind.sizes,
        **{name: value for name, value in text.items() if name not in wrapper.unread},
        **kind.fields,
        "architectures": [kind.architecture],
    }
    if not any(text.get(name) for name in _DTYPES):
        found |= {name: raw[name] for name in _DTYPES if raw.get(name)}
    for form in ROPE_FORMS:
        if isinstance(text.get(form), dict):
            found[form] = of_one_axis(text[form])
    # transformers reads only the outer flag. quire also reads an inner flag if there is no outer.
    ties = [each.get("tie_word_embeddings") for each in (raw, text)]
    found["tie_word_embeddings"] = next((tie for tie in ties if tie is not None), wrapper.is_tied)
    return found


def _without_images(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in raw if name != "vision_config"}
