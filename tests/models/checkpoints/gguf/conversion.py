"""Converts a tiny random model of transformers' to GGUF, as llama.cpp's converters do.

Names are those of the package gguf's own map; what else a converter does to an architecture's
tensors and writes of its config is said here, in the words of llama.cpp's `conversion` folder.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_writer import write_gguf
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedConfig

Tensors = Iterable[tuple[str, torch.Tensor]]
Modify = Callable[[str, torch.Tensor, Any], Tensors]
"""A tensor's name and content, and the config -> those that are written, by their names in
Hugging Face's checkpoints or, where they begin so, in GGUF."""


@dataclass(frozen=True)
class Conversion:
    """family: in `family_shapes`, with changes to its fields. architecture: llama.cpp's. fields:
    of its metadata beside those of all. unlike: fields of our config that the file doesn't say, and
    what they are then."""

    family: str
    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    modify: Modify = lambda name, tensor, config: [(name, tensor)]
    extra: Callable[[Any], Mapping[str, torch.Tensor]] = lambda config: {}
    unlike: Mapping[str, Any] = field(default_factory=dict)


def random_model(conversion: Conversion) -> tuple[PreTrainedConfig, Any]:
    """The same one always."""
    torch.manual_seed(0)
    if conversion.family == "bert":
        config: PreTrainedConfig = BertConfig(**conversion.changes)
        model: Any = BertModel(config)
    else:
        config = make_config(conversion.family, **conversion.changes)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
            if parameter.dim() == 1 and "norm" in name:
                parameter += 1
            if name.endswith("A_log"):
                parameter.copy_(torch.rand_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer))
    return config, model.to(torch.bfloat16)


def convert(conversion: Conversion, config: Any, model: Any, path: Path, **more: Any) -> Path:
    """In BF16, and fp32 for what has one dimension, or is a router. more: further metadata."""
    gguf = pytest.importorskip("gguf")
    architecture = next(
        kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == conversion.architecture
    )
    names = gguf.get_tensor_name_map(architecture, 16)
    tensors = dict(conversion.extra(config))
    for name, tensor in _saved(model):
        for new, content in conversion.modify(name, tensor.detach(), config):
            known = names.get_name(new, try_suffixes=(".weight", ".bias", ".scale"))
            tensors[known or new] = _stored(known or new, content)
            assert known or new.startswith("blk."), new
    return write_gguf(path, metadata(conversion, config) | more, tensors)


def metadata(conversion: Conversion, config: Any) -> dict[str, Any]:
    """With the fields that llama.cpp writes for all."""
    prefix = conversion.architecture
    config.allow_global_per_layer_attribute_access = True
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "rope.freq_base": rope.get("rope_theta"),
        "expert_count": _first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "top_k_experts"),
        "expert_group_count": getattr(config, "n_group", None),
        "expert_group_used_count": getattr(config, "topk_group", None),
        **_scaling(rope),
        **conversion.fields(config),
    }
    written = {f"{prefix}.{name}": value for name, value in fields.items() if value is not None}
    return {"general.architecture": prefix, "general.type": "model", **written}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return {}
    found = {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                found[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return found


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _saved(model: Any) -> Tensors:
    """As in a checkpoint: without the head where it is tied."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, tensor


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_plain = tensor.dim() < 2 or any(word in name for word in _PLAIN)
    return tensor.float() if is_plain else tensor.to(torch.bfloat16)


_PLAIN = ("ffn_gate_inp", "ssm_a", "ssm_d", "ssm_conv1d", "ssm_norm")


def permuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of llama.cpp's."""
    halves = tensor.reshape(num_heads, 2, len(tensor) // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def permute_heads(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """As Llama's converter does."""
    if ".q_proj." in name:
        tensor = permuted(tensor, config.num_attention_heads)
    if ".k_proj." in name:
        tensor = permuted(tensor, config.num_key_value_heads)
    yield name, tensor
