"""Lists the supported model architectures, and chooses one by a folder's config.json.

To add a family, add a file in `families/` and a line in `OWN_MODELS`. Called by
`models.checkpoints.loader` and `assembly`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError, UnsupportedModelError, shown
from quire.models.architectures import MODELS
from quire.models.checkpoints.arranged import Arrangement
from quire.models.checkpoints.quantized.methods import CONFIG_FIELDS, read_quantized
from quire.models.checkpoints.quantized.settings import Quantized
from quire.models.checkpoints.readers import find_reader
from quire.models.checkpoints.renamed import (
    Rename,
    with_prefix,
)
from quire.models.checkpoints.source import CheckpointSource
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import ModelConfig
from quire.models.config_fields import ROPE_FORMS, overridden
from quire.models.decoder import DecoderForCausalLM, DecoderForScores, HeadlessDecoder
from quire.models.fallback.conversion import ConvertedCheckpoint, shape_model
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.fallback.model import FallbackForCausalLM
from quire.models.families.bert import (
    BertConfig,
    BertForScores,
    BertForTokenScores,
    BertModel,
    rename_with_head,
    rename_with_token_head,
    rename_without_head,
)
from quire.models.families.gemma.gemma2 import Gemma2Config, GemmaForCausalLM
from quire.models.families.gemma.gemma3 import Gemma3Config
from quire.models.families.gemma.gemma4 import Gemma4Config, rename_gemma4, unused_keys
from quire.models.families.gemma.gemma4_layers import Gemma4ForCausalLM
from quire.models.families.glm import (
    Glm4ForCausalLM,
    GlmConfig,
    neighbouring_pairs,
    rename_glm4,
)
from quire.models.families.granite import GraniteConfig
from quire.models.families.hybrids import (
    delta_hybrid,
    falcon_h1,
    lfm2,
    mamba_parts,
    nemotron_h,
    qwen3_5,
    qwen3_next,
)
from quire.models.families.latent import deepseek, glm4_moe_lite, latent_decoder
from quire.models.families.learned_positions.gpt2 import (
    GPT2Config,
    rename_gpt2,
    transposed_linears,
)
from quire.models.families.learned_positions.opt import OPTConfig, rename_opt, spare_positions
from quire.models.families.llama import LlamaConfig, LlamaForCausalLM
from quire.models.families.ministral import Ministral3Config, MinistralConfig
from quire.models.families.mistral import MistralConfig
from quire.models.families.moe import gpt_oss, granite_moe, mixtral
from quire.models.families.moe.glm4_moe import Glm4MoeConfig
from quire.models.families.moe.olmoe import OlmoeConfig
from quire.models.families.moe.qwen3_moe import Qwen3MoeConfig
from quire.models.families.olmo import OlmoConfig
from quire.models.families.olmo2 import Olmo2Config, Olmo2ForCausalLM
from quire.models.families.olmo3 import Olmo3Config
from quire.models.families.phi3 import Phi3Config, fused_linears
from quire.models.families.qwen2 import Qwen2Config
from quire.models.families.qwen3 import Qwen3Config
from quire.models.families.smollm3 import SmolLM3Config
from quire.models.families.stablelm import StableLmConfig, StableLmForCausalLM
from quire.models.heads import eagle3, mtp
from quire.models.interface import TextModel
from quire.models.model_entry import CHECKPOINT_PARTS, ModelEntry
from quire.models.transformers_names.model_types import with_architecture
from quire.models.wrappers import WRAPPERS, unwrapped

_QKV_PARTS = {"qkv_proj": CHECKPOINT_PARTS["qkv_proj"]}
_LATENT_PARTS = {
    "gate_up_proj": CHECKPOINT_PARTS["gate_up_proj"],
    **latent_decoder.LATENT_PARTS,
}


def _headless(config: type[ModelConfig]) -> ModelEntry:
    """The entry of a decoder without a head. If the files have a head, it is ignored."""
    return ModelEntry(config, HeadlessDecoder, rename=with_prefix("model.", "lm_head.", "score."))


def _mixture(
    config: type[ModelConfig],
    rename: Rename | None = None,
    unstack: Callable[[CheckpointSource], CheckpointSource] = UnstackedCheckpoint,
) -> ModelEntry:
    """The entry of a mixture of experts. In the files, experts may be stacked or separate."""
    return ModelEntry(config, DecoderForCausalLM, rename=rename, unstack=unstack)


def _delta_hybrid(
    config: type[ModelConfig], arrangement: Callable[[Any], Arrangement]
) -> ModelEntry:
    """The entry of Qwen3-Next or Qwen3.5."""
    return ModelEntry(
        config,
        delta_hybrid.DeltaHybridForCausalLM,
        CHECKPOINT_PARTS | delta_hybrid.DELTA_NET_PARTS,
        rename=delta_hybrid.rename,
        arrangement=arrangement,
        unstack=UnstackedCheckpoint,
    )


def _bert(model: type[TextModel], rename: Rename) -> ModelEntry:
    return ModelEntry(BertConfig, model, _QKV_PARTS, rename=rename)


def _latent(config: type[ModelConfig]) -> ModelEntry:
    return ModelEntry(
        config,
        latent_decoder.LatentForCausalLM,
        _LATENT_PARTS,
        arrangement=latent_decoder.arrangement,
        unstack=UnstackedCheckpoint,
    )


OWN_MODELS: dict[str, ModelEntry] = {
    "BertForMaskedLM": _bert(BertModel, rename_without_head),
    "BertForSequenceClassification": _bert(BertForScores, rename_with_head),
    "BertForTokenClassification": _bert(BertForTokenScores, rename_with_token_head),
    "BertModel": _bert(BertModel, rename_without_head),
    "DeepseekV2ForCausalLM": _latent(deepseek.DeepseekV2Config),
    "DeepseekV3ForCausalLM": _latent(deepseek.DeepseekV3Config),
    "FalconH1ForCausalLM": ModelEntry(
        falcon_h1.FalconH1Config,
        falcon_h1.FalconH1ForCausalLM,
        CHECKPOINT_PARTS | mamba_parts.MAMBA_PARTS,
        rename=falcon_h1.rename,
        arrangement=falcon_h1.arrangement,
    ),
    "Gemma2ForCausalLM": ModelEntry(Gemma2Config, GemmaForCausalLM),
    "Gemma3ForCausalLM": ModelEntry(Gemma3Config, GemmaForCausalLM),
    "Gemma4ForCausalLM": ModelEntry(
        Gemma4Config,
        Gemma4ForCausalLM,
        {**CHECKPOINT_PARTS, "qk_proj": ("q_proj", "k_proj")},
        rename=rename_gemma4,
        arrangement=unused_keys,
        unstack=UnstackedCheckpoint,
    ),
    "Glm4ForCausalLM": ModelEntry(
        GlmConfig, Glm4ForCausalLM, rename=rename_glm4, arrangement=neighbouring_pairs
    ),
    "Glm4MoeForCausalLM": _mixture(Glm4MoeConfig),
    "Glm4MoeLiteForCausalLM": _latent(glm4_moe_lite.Glm4MoeLiteConfig),
    "GlmForCausalLM": ModelEntry(GlmConfig, DecoderForCausalLM, arrangement=neighbouring_pairs),
    "GPT2LMHeadModel": ModelEntry(
        GPT2Config,
        DecoderForCausalLM,
        _QKV_PARTS,
        rename=rename_gpt2,
        arrangement=transposed_linears,
    ),
    "GptOssForCausalLM": _mixture(
        gpt_oss.GptOssConfig, gpt_oss.rename, partial(UnstackedCheckpoint, is_transposed=True)
    ),
    "GraniteForCausalLM": ModelEntry(GraniteConfig, DecoderForCausalLM),
    "GraniteModel": _headless(GraniteConfig),
    "GraniteMoeForCausalLM": _mixture(granite_moe.GraniteMoeConfig, granite_moe.rename),
    "Lfm2ForCausalLM": ModelEntry(
        lfm2.Lfm2Config,
        lfm2.Lfm2ForCausalLM,
        CHECKPOINT_PARTS | lfm2.CONV_PARTS,
        rename=lfm2.rename,
        arrangement=lfm2.arrangement,
    ),
    "LlamaForCausalLM": ModelEntry(LlamaConfig, LlamaForCausalLM),
    "LlamaForSequenceClassification": ModelEntry(LlamaConfig, DecoderForScores),
    "LlamaModel": _headless(LlamaConfig),
    "Ministral3ForCausalLM": ModelEntry(Ministral3Config, DecoderForCausalLM),
    "MinistralForCausalLM": ModelEntry(MinistralConfig, DecoderForCausalLM),
    "MistralForCausalLM": ModelEntry(MistralConfig, LlamaForCausalLM),
    "MistralForSequenceClassification": ModelEntry(MistralConfig, DecoderForScores),
    "MistralModel": _headless(MistralConfig),
    "MixtralForCausalLM": _mixture(mixtral.MixtralConfig, mixtral.rename),
    "NemotronHForCausalLM": ModelEntry(
        nemotron_h.NemotronHConfig,
        nemotron_h.NemotronHForCausalLM,
        {"qkv_proj": CHECKPOINT_PARTS["qkv_proj"], **mamba_parts.MAMBA_PARTS},
        rename=nemotron_h.rename,
        arrangement=nemotron_h.arrangement,
    ),
    "Olmo2ForCausalLM": ModelEntry(Olmo2Config, Olmo2ForCausalLM),
    "Olmo3ForCausalLM": ModelEntry(Olmo3Config, Olmo2ForCausalLM),
    "OlmoeForCausalLM": _mixture(OlmoeConfig),
    "OlmoForCausalLM": ModelEntry(OlmoConfig, DecoderForCausalLM),
    "OPTForCausalLM": ModelEntry(
        OPTConfig, DecoderForCausalLM, _QKV_PARTS, rename=rename_opt, arrangement=spare_positions
    ),
    "Phi3ForCausalLM": ModelEntry(Phi3Config, DecoderForCausalLM, arrangement=fused_linears),
    "Qwen2ForCausalLM": ModelEntry(Qwen2Config, LlamaForCausalLM),
    "Qwen2ForSequenceClassification": ModelEntry(Qwen2Config, DecoderForScores),
    "Qwen2Model": _headless(Qwen2Config),
    "Qwen3_5ForCausalLM": _delta_hybrid(qwen3_5.Qwen35Config, qwen3_5.arrangement),
    "Qwen3_5MoeForCausalLM": _delta_hybrid(qwen3_5.Qwen35MoeConfig, qwen3_5.arrangement),
    "Qwen3ForCausalLM": ModelEntry(Qwen3Config, LlamaForCausalLM),
    "Qwen3ForSequenceClassification": ModelEntry(Qwen3Config, DecoderForScores),
    "Qwen3Model": _headless(Qwen3Config),
    "Qwen3MoeForCausalLM": _mixture(Qwen3MoeConfig),
    "Qwen3NextForCausalLM": _delta_hybrid(qwen3_next.Qwen3NextConfig, qwen3_next.arrangement),
    "SmolLM3ForCausalLM": ModelEntry(SmolLM3Config, DecoderForCausalLM),
    "StableLmForCausalLM": ModelEntry(StableLmConfig, StableLmForCausalLM),
}


def _mtp(
    config: type[ModelConfig],
    model: type[mtp.MTPHead] = mtp.MTPHead,
    parts: Mapping[str, tuple[str, ...]] = CHECKPOINT_PARTS,
    arrangement: Callable[[Any], Arrangement] | None = None,
) -> ModelEntry:
    """The entry of a head of a mixture of experts."""
    return mtp.MTPEntry(config, model, parts, arrangement=arrangement, unstack=UnstackedCheckpoint)


MTP_HEADS = {
    "DeepseekV3ForCausalLM": "DeepseekV3MTP",
    "Glm4MoeForCausalLM": "Glm4MoeMTP",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5MTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeMTP",
    "Qwen3NextForCausalLM": "Qwen3NextMTP",
}
"""For each architecture whose MTP heads can draft, the key of the heads' entry in HEADS."""

HEADS: dict[str, ModelEntry] = {
    "DeepseekV3MTP": _mtp(
        deepseek.DeepseekV3Config,
        mtp.LatentMTPHead,
        _LATENT_PARTS,
        latent_decoder.arrangement,
    ),
    "Glm4MoeMTP": _mtp(Glm4MoeConfig),
    "Glm4MoeLiteMTP": _mtp(
        glm4_moe_lite.Glm4MoeLiteConfig,
        mtp.LatentMTPHead,
        _LATENT_PARTS,
        latent_decoder.arrangement,
    ),
    eagle3.ARCHITECTURES[0]: ModelEntry(
        eagle3.Eagle3Config,
        eagle3.Eagle3Head,
        embedding="embed_tokens.weight",
        rename=eagle3.rename_eagle3,
    ),
    "Qwen3_5MTP": _mtp(
        qwen3_5.Qwen35Config, mtp.HybridMTPHead, CHECKPOINT_PARTS, qwen3_5.arrangement
    ),
    "Qwen3_5MoeMTP": _mtp(
        qwen3_5.Qwen35MoeConfig, mtp.HybridMTPHead, CHECKPOINT_PARTS, qwen3_5.arrangement
    ),
    "Qwen3NextMTP": _mtp(
        qwen3_next.Qwen3NextConfig, mtp.HybridMTPHead, CHECKPOINT_PARTS, qwen3_next.arrangement
    ),
}
"""Heads that draft for another model, which no engine serves alone."""


@dataclass(frozen=True, slots=True)
class _FallbackEntry(ModelEntry):
    """The entry of one model that a class of transformers computes."""

    def open(self, folder: Path, config: ModelConfig) -> CheckpointSource:
        assert isinstance(config, FallbackConfig)
        # Dataclasses with slots don't support super() without arguments.
        return ConvertedCheckpoint(ModelEntry.open(self, folder, config), shape_model(config.raw))


def find_entry(config: ModelConfig) -> ModelEntry:
    """The entry of a model, or of a head that drafts, with this config."""
    if config.architecture in HEADS:
        return HEADS[config.architecture]
    if not isinstance(config, FallbackConfig):
        return MODELS.get(config.architecture)
    return _FallbackEntry(
        FallbackConfig,
        FallbackForCausalLM,
        CHECKPOINT_PARTS,
        embedding=config.embedding,
        head=config.head,
    )


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
