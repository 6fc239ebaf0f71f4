"""Writes models of transformers as pairs of GGUF files, as llama.cpp's converters do."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from tests.gguf_writer import Raw, write_gguf
from tests.models.checkpoints.gguf.conversion import Conversion, convert, permute_heads, permuted
from tests.models.checkpoints.gguf.conversions import CONVERSIONS
from tests.models.vision.gemma4_files import TEXT as GEMMA4_TEXT
from transformers import PreTrainedModel

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_LLAMA = Conversion("llama", "llama", modify=permute_heads)


_MOST_LAYERS = 32
GLOBAL_HEAD_DIM: int = GEMMA4_TEXT["global_head_dim"]
"""Size of the heads of Gemma 4's layers with full attention."""


def _turned_quarter(head_dim: int) -> torch.Tensor:
    return torch.tensor([1.0] * (head_dim // 8) + [1e30] * (3 * head_dim // 8))


def _sections(config: Any) -> list[int]:
    return [*config.rope_parameters["mrope_section"], 0]


_TEXTS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": CONVERSIONS["qwen2"],
    "qwen3": CONVERSIONS["qwen3"],
    "gemma3_text": replace(
        CONVERSIONS["gemma3"],
        fields=lambda config: {
            "attention.sliding_window": config.sliding_window,
            "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        },
    ),
    "gemma4_text": replace(
        CONVERSIONS["gemma4"],
        fields=lambda config: {
            **CONVERSIONS["gemma4"].fields(config),
            "attention.key_length": GLOBAL_HEAD_DIM,
            "attention.value_length": GLOBAL_HEAD_DIM,
            "rope.dimension_count": GLOBAL_HEAD_DIM,
        },
        extra=lambda config: {"rope_freqs.weight": _turned_quarter(GLOBAL_HEAD_DIM)},
    ),
    "lfm2": replace(
        CONVERSIONS["lfm2"],
        fields=lambda config: {
            **CONVERSIONS["lfm2"].fields(config),
            # Of the shapes that config.json says, two thirds in whole blocks.
            "feed_forward_length": 2 * config.intermediate_size // 3,
            "attention.head_count_kv": [
                config.num_key_value_heads * (kind == "full_attention")
                for kind in config.layer_types
            ],
        },
    ),
    "qwen3_vl_text": Conversion(
        "qwen3",
        "qwen3vl",
        fields=lambda config: {
            "rope.dimension_sections": _sections(config),
            "n_deepstack_layers": 2,
        },
    ),
    "qwen3_5_text": Conversion(
        "qwen3_5",
        "qwen35",
        fields=lambda config: {
            **CONVERSIONS["qwen3_5"].fields(config),
            "rope.dimension_sections": _sections(config),
        },
        modify=CONVERSIONS["qwen3_5"].modify,
    ),
}
"""Conversions by the model_type of the text_config."""


def round_matrices(model: PreTrainedModel) -> None:
    """Round all weights that `write_text` stores in bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())


def write_text(model: PreTrainedModel, path: Path, **metadata: Any) -> Path:
    """Write the language model. `metadata`: further fields."""
    config: Any = model.config.text_config
    tensors = {}
    for name, tensor in model.state_dict().items():
        for prefix in ("model.text_model.", "model.language_model."):
            if name.startswith(prefix):
                tensors["model." + name.removeprefix(prefix)] = tensor
        if name.startswith("lm_head."):
            tensors[name] = tensor
    tied = bool(model.config.tie_word_embeddings)
    part = SimpleNamespace(
        state_dict=lambda: tensors, config=SimpleNamespace(tie_word_embeddings=tied)
    )
    return convert(_TEXTS[config.model_type], config, part, path, **metadata)


def write_mmproj(
    model: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    names: Mapping[str, str] | None = None,
    **changes: Any,
) -> Path:
    """Write the encoder, with its matrices in `kind`. `names`: words of the tensors' names, and
    those that replace them. `changes`: metadata that differ; None leaves a field out."""
    vision: Any = model.config.vision_config
    family = str(model.config.model_type)
    write = {"smolvlm": _idefics3, "internvl": _internvl, "mistral3": _pixtral, "llava": _pixtral}
    write |= {"gemma3": _gemma3, "gemma4": _gemma4, "lfm2_vl": _lfm2_vl}
    fields, tensors = write.get(family, _qwen)(model)
    sizes = {
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": getattr(vision, "num_hidden_layers", None) or vision.depth,
        "attention.head_count": getattr(vision, "num_attention_heads", None) or vision.num_heads,
        "projection_dim": model.config.text_config.hidden_size,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", 1e-5)),
        "patch_size": _side(vision.patch_size),
        "image_size": _side(getattr(vision, "image_size", 0)),
        **{name: value for name, value in fields.items() if not name.startswith("clip.")},
    }
    metadata = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        **{name: value for name, value in fields.items() if name.startswith("clip.")},
        **{f"clip.vision.{name}": value for name, value in sizes.items()},
        **changes,
    }
    metadata = {name: value for name, value in metadata.items() if value is not None}
    stored = {}
    for name, tensor in tensors.items():
        words = ((names or {}).get(word, word) for word in name.split("."))
        stored[".".join(words)] = _stored(name, tensor.detach(), kind)
    return write_gguf(path, metadata, stored)


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])


def _stored(name: str, tensor: torch.Tensor, kind: str) -> "torch.Tensor | Raw":
    if tensor.dim() < 2 or "embd" in name:
        return tensor.float()
    if kind == "Q8_0" and tensor.shape[-1] % 32 == 0:
        content = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        return Raw(np.ascontiguousarray(content).tobytes(), kind, tuple(tensor.shape))
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    return tensor.to(dtype)


_SUFFIXES = (".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max")


def _named(
    model: PreTrainedModel, prefixes: tuple[str, ...], names: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name in Hugging Face's files, name in GGUF, content) of the encoder's tensors. `names`:
    words that replace others before the package gguf is asked."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, _MOST_LAYERS)
    for name, tensor in model.state_dict().items():
        if not name.startswith(tuple(f"model.{prefix}" for prefix in prefixes)):
            continue
        asked = name
        for word, other in (names or {}).items():
            asked = asked.replace(word, other)
        found = known.get_name(asked, try_suffixes=_SUFFIXES)
        found = found or known.get_name(asked.removeprefix("model."), _SUFFIXES)
        assert found is not None, name
        yield name, found, tensor


Written = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""Metadata without "clip.vision." (or with "clip."), and tensors."""


def _idefics3(model: PreTrainedModel) -> Written:
    fields = {
        "clip.projector_type": "idefics3",
        "clip.use_gelu": True,
        "projector.scale_factor": model.config.scale_factor,
        "preproc_image_size": 2 * model.config.vision_config.image_size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    prefixes = ("vision_model.", "connector.")
    return fields, {new: tensor for _, new, tensor in _named(model, prefixes)}


_SIGLIP_NAMES = {"model.multi": "multi", "model.vision_tower.": "vision_tower.vision_model."}


def _gemma3(model: PreTrainedModel) -> Written:
    vision: Any = model.config.vision_config
    side = vision.image_size // vision.patch_size
    fields = {
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "projector.scale_factor": side // int(model.config.mm_tokens_per_image**0.5),
        "attention.layer_norm_epsilon": vision.layer_norm_eps,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    parts = ("embeddings", "encoder", "post_layernorm")  # the head is left out
    prefixes = (*(f"vision_tower.{part}" for part in parts), "multi_modal_projector.")
    names = {**_SIGLIP_NAMES, "input_projection_weight": "input_projection.weight"}
    named = _named(model, prefixes, names)
    return fields, {new: tensor + ("soft_emb_norm" in new) for _, new, tensor in named}


def _gemma4(model: PreTrainedModel) -> Written:
    """With an encoder of sound, which quire does not read."""
    size = model.config.vision_config.patch_size
    fields = {
        "clip.vision.projector_type": "gemma4v",
        "clip.audio.projector_type": "gemma4a",
        "clip.has_audio_encoder": True,
        "clip.audio.num_mel_bins": 128,
        "projector.scale_factor": model.config.vision_config.pooling_kernel_size,
        "image_size": 224,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
    }
    names = {"model.vision_tower.encoder.": "vision_model.model.", ".linear.weight": ".weight"}
    names |= {"_table": "_table.weight"}
    tensors = {"a.blk.0.ln1.weight": torch.ones(4)}
    for _, new, tensor in _named(model, ("vision_tower.", "embed_vision."), names):
        is_patches = new == "v.patch_embd.weight"
        kernel = tensor.view(-1, size, size, 3).permute(0, 3, 1, 2) if is_patches else tensor
        tensors[new] = kernel.contiguous().reshape(kernel.shape or (1,))
    return fields, tensors


def _lfm2_vl(model: PreTrainedModel) -> Written:
    vision: Any = model.config.vision_config
    fields = {
        "clip.projector_type": "lfm2",
        "clip.use_gelu": True,
        "projector.scale_factor": model.config.downsample_factor,
        "image_size": 256,
        "attention.layer_norm_epsilon": vision.layer_norm_eps,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    prefixes, size = ("vision_tower.", "multi_modal_projector."), vision.patch_size
    tensors = {}
    for _, new, tensor in _named(model, prefixes, _SIGLIP_NAMES):
        is_patches = new == "v.patch_embd.weight"
        kernel = tensor.view(-1, size, size, 3).permute(0, 3, 1, 2) if is_patches else tensor
        tensors[new] = kernel.contiguous()
    return fields, tensors


def _internvl(model: PreTrainedModel) -> Written:
    fields = {
        "clip.projector_type": "internvl",
        "clip.use_gelu": True,
        "projector.scale_factor": round(1 / model.config.downsample_ratio),
        "preproc_min_tiles": 1,
        "preproc_max_tiles": 4,
    }
    names = {
        "model.multi_modal_projector.layer_norm": "mlp1.0",
        "model.multi_modal_projector.linear_1": "mlp1.1",
        "model.multi_modal_projector.linear_2": "mlp1.3",
        "lambda_1": "lambda_1.weight",
        "lambda_2": "lambda_2.weight",
        "position_embeddings": "position_embeddings.weight",
        "model.vision_tower.layernorm": "model.vision_model.post_layernorm",
    }
    prefixes = ("vision_tower.", "multi_modal_projector.")
    return fields, {new: tensor for _, new, tensor in _named(model, prefixes, names)}


def _pixtral(model: PreTrainedModel) -> Written:
    vision: Any = model.config.vision_config
    act = {"silu": "clip.use_silu", "gelu": "clip.use_gelu"}[vision.hidden_act]
    fields = {
        "clip.projector_type": "pixtral",
        act: True,
        "spatial_merge_size": getattr(model.config, "spatial_merge_size", None),
    }
    tensors = {}
    for name, new, tensor in _named(model, ("vision_tower.", "multi_modal_projector.")):
        is_turned = ".q_proj." in name or ".k_proj." in name
        tensors[new] = permuted(tensor, vision.num_attention_heads) if is_turned else tensor
    tensors["v.token_embd.img_break"] = model.get_input_embeddings().weight[12]
    return fields, tensors


def _qwen(model: PreTrainedModel) -> Written:
    vision: Any = model.config.vision_config
    layers = list(getattr(vision, "deepstack_visual_indexes", None) or [])
    side = int(vision.num_position_embeddings**0.5)
    fields = {
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        "spatial_merge_size": vision.spatial_merge_size,
        "image_size": side * vision.patch_size,
        "is_deepstack_layers": [layer in layers for layer in range(vision.depth)],
        "attention.layer_norm_epsilon": 1e-6,
        "image_min_pixels": 4 * vision.patch_size**2,
        "image_max_pixels": 256 * vision.patch_size**2,
    }
    tensors: dict[str, torch.Tensor] = {}
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, _MOST_LAYERS)
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.visual."):
            continue
        bare = name.removeprefix("model.visual.")
        if bare == "patch_embed.proj.weight":
            tensors["v.patch_embd.weight"] = tensor[:, :, 0]
            tensors["v.patch_embd.weight.1"] = tensor[:, :, 1]
        elif bare.startswith("deepstack_merger_list."):
            _, index, part, parameter = bare.replace("linear_", "").split(".")
            tensors[f"v.deepstack.{layers[int(index)]}.{part}.{parameter}"] = tensor
        elif bare.startswith("merger.norm."):
            tensors[f"v.post_ln.{bare.rpartition('.')[2]}"] = tensor
        elif bare.startswith("merger."):
            place = {"linear_fc1": 0, "linear_fc2": 2}[bare.split(".")[1]]
            tensors[f"mm.{place}.{bare.rpartition('.')[2]}"] = tensor
        elif bare == "patch_embed.proj.bias":
            tensors["v.patch_embd.bias"] = tensor
        else:
            found = known.get_name(f"visual.{bare}", try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            tensors[found] = tensor
    return fields, tensors
