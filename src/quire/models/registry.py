"""Lists the supported model architectures, and chooses one by a folder's config.json.

To add a family, add a file in `families/`, with its entry, and a line in `OWN_MODELS`. Called by
`models.checkpoints.loader` and `assembly`.
"""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError, UnsupportedModelError, shown
from quire.models.architectures import MODELS
from quire.models.checkpoints.quantized.methods import CONFIG_FIELDS, read_quantized
from quire.models.checkpoints.quantized.settings import Quantized
from quire.models.checkpoints.readers import find_reader
from quire.models.config import ModelConfig
from quire.models.config_fields import ROPE_FORMS, overridden
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.model_entry import ModelEntry
from quire.models.transformers_names.model_types import with_architecture
from quire.models.wrappers import WRAPPERS, unwrapped
from quire.registry import Registry

OWN_MODELS: dict[str, str] = {
    name: f"quire.models.families.{entry}"
    for name, entry in {
        "BertForMaskedLM": "bert:HEADLESS_ENTRY",
        "BertForSequenceClassification": "bert:SCORES_ENTRY",
        "BertForTokenClassification": "bert:TOKEN_SCORES_ENTRY",
        "BertModel": "bert:HEADLESS_ENTRY",
        "DeepseekV2ForCausalLM": "latent.deepseek:V2_ENTRY",
        "DeepseekV3ForCausalLM": "latent.deepseek:V3_ENTRY",
        "FalconH1ForCausalLM": "hybrids.falcon_h1:ENTRY",
        "Gemma2ForCausalLM": "gemma.gemma2:ENTRY",
        "Gemma3ForCausalLM": "gemma.gemma3:ENTRY",
        "Gemma4ForCausalLM": "gemma.gemma4_layers:ENTRY",
        "Glm4ForCausalLM": "glm:GLM4_ENTRY",
        "Glm4MoeForCausalLM": "moe.glm4_moe:ENTRY",
        "Glm4MoeLiteForCausalLM": "latent.glm4_moe_lite:ENTRY",
        "GlmForCausalLM": "glm:ENTRY",
        "GPT2LMHeadModel": "learned_positions.gpt2:ENTRY",
        "GptOssForCausalLM": "moe.gpt_oss:ENTRY",
        "GraniteForCausalLM": "granite:ENTRY",
        "GraniteModel": "granite:HEADLESS_ENTRY",
        "GraniteMoeForCausalLM": "moe.granite_moe:ENTRY",
        "Lfm2ForCausalLM": "hybrids.lfm2:ENTRY",
        "LlamaForCausalLM": "llama:ENTRY",
        "LlamaForSequenceClassification": "llama:SCORES_ENTRY",
        "LlamaModel": "llama:HEADLESS_ENTRY",
        "Ministral3ForCausalLM": "ministral:ENTRY_3",
        "MinistralForCausalLM": "ministral:ENTRY",
        "MistralForCausalLM": "mistral:ENTRY",
        "MistralForSequenceClassification": "mistral:SCORES_ENTRY",
        "MistralModel": "mistral:HEADLESS_ENTRY",
        "MixtralForCausalLM": "moe.mixtral:ENTRY",
        "NemotronHForCausalLM": "hybrids.nemotron_h:ENTRY",
        "Olmo2ForCausalLM": "olmo2:ENTRY",
        "Olmo3ForCausalLM": "olmo3:ENTRY",
        "OlmoeForCausalLM": "moe.olmoe:ENTRY",
        "OlmoForCausalLM": "olmo:ENTRY",
        "OPTForCausalLM": "learned_positions.opt:ENTRY",
        "Phi3ForCausalLM": "phi3:ENTRY",
        "Qwen2ForCausalLM": "qwen2:ENTRY",
        "Qwen2ForSequenceClassification": "qwen2:SCORES_ENTRY",
        "Qwen2Model": "qwen2:HEADLESS_ENTRY",
        "Qwen3_5ForCausalLM": "hybrids.qwen3_5:ENTRY",
        "Qwen3_5MoeForCausalLM": "hybrids.qwen3_5:MOE_ENTRY",
        "Qwen3ForCausalLM": "qwen3:ENTRY",
        "Qwen3ForSequenceClassification": "qwen3:SCORES_ENTRY",
        "Qwen3Model": "qwen3:HEADLESS_ENTRY",
        "Qwen3MoeForCausalLM": "moe.qwen3_moe:ENTRY",
        "Qwen3NextForCausalLM": "hybrids.qwen3_next:ENTRY",
        "SmolLM3ForCausalLM": "smollm3:ENTRY",
        "StableLmForCausalLM": "stablelm:ENTRY",
    }.items()
}
"""The entry of each architecture. A family is imported when one of its entries is first needed,
because all of them take a tenth of a second."""

MTP_HEADS = {
    "DeepseekV3ForCausalLM": "DeepseekV3MTP",
    "Glm4MoeForCausalLM": "Glm4MoeMTP",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5MTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeMTP",
    "Qwen3NextForCausalLM": "Qwen3NextMTP",
}
"""For each architecture whose MTP heads can draft, the key of the heads' entry in HEADS."""

HEADS: "Registry[ModelEntry]" = Registry(
    "head",
    {
        name: f"quire.models.heads.{entry}"
        for name, entry in {
            "DeepseekV3MTP": "mtp_entries:DEEPSEEK_V3",
            "Glm4MoeMTP": "mtp_entries:GLM4_MOE",
            "Glm4MoeLiteMTP": "mtp_entries:GLM4_MOE_LITE",
            "LlamaForCausalLMEagle3": "eagle3:ENTRY",
            "Qwen3_5MTP": "mtp_entries:QWEN3_5",
            "Qwen3_5MoeMTP": "mtp_entries:QWEN3_5_MOE",
            "Qwen3NextMTP": "mtp_entries:QWEN3_NEXT",
        }.items()
    },
)
"""Heads that draft for another model, which no engine serves alone."""


def find_entry(config: ModelConfig) -> ModelEntry:
    """The entry of a model, or of a head that drafts, with this config."""
    if config.architecture in HEADS:
        return HEADS.get(config.architecture)
    if not isinstance(config, FallbackConfig):
        return MODELS.get(config.architecture)
    from quire.models.fallback.fallback_entry import fallback_entry  # keeps start-up light

    return fallback_entry(config)


_TAKE_TRANSFORMERS = (
    "its class of transformers may compute it in place of quire's own: --model-impl transformers,"
    " or model_impl='transformers' in Python"
)


def load_config(
    folder: Path,
    *,
    pools_hidden: bool = False,
    overrides: Mapping[str, Any] | None = None,
    from_transformers: bool | None = None,
) -> ModelConfig:
    """Read the config of a model folder in Hugging Face's format.

    With `pools_hidden`, only hidden states are needed, so the model has no head for tokens.
    `overrides` replace fields of the config; in a multimodal model, fields of its language model.
    `from_transformers` says whether a class of transformers computes the model; if it is None,
    transformers is used only if quire has no class.

    Raises CheckpointError if config.json can't be read or is incomplete, and UnsupportedModelError
    for an unsupported architecture or field.
    """
    # First, read the file, and find the language model's own fields.
    path = folder / "config.json"
    reader = find_reader(folder)
    whole = reader.read_config(folder)
    quantized = read_quantized(str(folder), whole)
    if quantized is None and (method := reader.quantized_by(folder)) is not None:
        quantized = Quantized(method)
    text, wrapper = unwrapped(with_architecture(whole))
    raw = _without_settings(overridden(text, overrides or {}), overrides or {})
    raw = with_architecture(raw)
    # Then, choose between quire's class and the fallback to transformers.
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    is_native = isinstance(name, str) and name in MODELS
    if from_transformers or (from_transformers is None and not is_native):
        fallback = _fallback_config(path, raw, wrapper, is_native=is_native)
        return replace(fallback, quantized=quantized)
    if not is_native:
        raise UnsupportedModelError(
            f"{path}: architectures is {shown(names)}, for which quire has no model of its own"
            f" (model_impl is 'native'){_nearest(names)}"
        )
    # Then, read the fields for quire's class.
    assert name is not None
    base = name.removesuffix("ForCausalLM") + "Model"
    if pools_hidden and MODELS.get(name).generates and base in MODELS:
        name = base
    try:
        config = MODELS.get(name).config.from_hf(raw)
    except UnsupportedModelError as error:
        if from_transformers is None and MODELS.get(name).generates:
            raise UnsupportedModelError(f"{error}; {_TAKE_TRANSFORMERS}") from error
        raise
    # Last, refuse overrides without effect.
    given = {*(overrides or {}), *(ROPE_FORMS if {*ROPE_FORMS} & {*(overrides or {})} else ())}
    unread = [name for name in config.left_out if name.partition(".")[0] in given]
    if unread:
        raise ConfigurationError(
            f"hf_overrides has {', '.join(unread)}, which no model reads; leave it out, or"
            " correct the name"
        )
    if config.tie_word_embeddings and not MODELS.get(name).generates:
        config = replace(config, tie_word_embeddings=False)  # there is no head to tie
    return replace(config, architecture=name, wrapper=wrapper, quantized=quantized)


def _without_settings(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the fields that describe how weights are stored.

    Raises ConfigurationError if `overrides` has such a field, since options can't change the files.
    """
    for name in CONFIG_FIELDS:
        if name in overrides:
            raise ConfigurationError(
                f"hf_overrides has {name}, but how weights are stored is read from the model's own"
                " config.json; leave it out"
            )
    return {name: value for name, value in raw.items() if name not in CONFIG_FIELDS}


def _fallback_config(
    path: Path, raw: Mapping[str, Any], wrapper: str | None, *, is_native: bool
) -> FallbackConfig:
    try:
        return replace(FallbackConfig.from_hf(raw), wrapper=wrapper)
    except UnsupportedModelError as error:
        own = f"; quire has no model of its own for it{_nearest(raw.get('architectures'))}"
        if is_native:
            own = "; quire has a model of its own for it, which model_impl 'auto' uses"
        raise UnsupportedModelError(f"{path.parent}: {error}{own}") from error


def _nearest(names: object) -> str:
    """The end of an error message: quire's models with similar names, and where all of them are
    listed."""
    name = str(names[0]) if isinstance(names, list) and names else ""
    stems = {each: each.partition("For")[0] for each in (*MODELS, *WRAPPERS)}
    alike = get_close_matches(name.partition("For")[0], set(stems.values()), n=3, cutoff=0.75)
    found = [each for each, stem in stems.items() if stem in alike]
    known = f"; those with similar names are {', '.join(found)}" if found else ""
    return f"{known}; docs/models.md lists all that quire has"
