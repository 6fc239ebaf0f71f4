"""What llama.cpp's converters do to tensors, and write of configs."""

import math
from typing import Any

import torch
from tests.models.checkpoints.gguf.conversion import Tensors, permute_heads


def rope_freqs(config: Any) -> dict[str, torch.Tensor]:
    """`LlamaModel.generate_extra_tensors`."""
    rope, dim = config.rope_parameters, config.head_dim
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    found = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": torch.tensor(found)}


def shifted_norms(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Gemma's: the one that the model adds is in the weights."""
    yield name, tensor.float() + 1 if name.endswith("norm.weight") else tensor


def plain_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Stacked ones of transformers 5 -> the stacked ones of llama.cpp, gate and up apart."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        base = name.removesuffix("gate_up_proj")
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def llama_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Of families whose converter is Llama's."""
    for new, content in plain_experts(name, tensor, config):
        yield from permute_heads(new, content, config)


def granite_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`GraniteMoeModel.modify_tensors`."""
    name = name.replace("input_linear.weight", "experts.gate_up_proj")
    name = name.replace("output_linear.weight", "experts.down_proj")
    if "experts" not in name:
        name = name.replace("router.weight", "router.layer.weight")
        yield from permute_heads(name, tensor, config)
        return
    layer = name.split(".")[2]
    for new, content in plain_experts(name, tensor, config):
        yield f"blk.{layer}.ffn_{new.split('.')[-2].removesuffix('_proj')}_exps.weight", content


def gpt_oss_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Gate and up alternate, and weights are transposed."""
    layer = name.split(".")[2] if ".layers." in name else ""
    for suffix, parameter in (("", "weight"), ("_bias", "bias")):
        content = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if name.endswith(f"experts.gate_up_proj{suffix}"):
            yield f"blk.{layer}.ffn_gate_exps.{parameter}", content[:, 0::2]
            yield f"blk.{layer}.ffn_up_exps.{parameter}", content[:, 1::2]
            return
        if name.endswith(f"experts.down_proj{suffix}"):
            yield f"blk.{layer}.ffn_down_exps.{parameter}", content
            return
    yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def gemma4(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Scales of routers and of experts beside what they multiply."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def gemma4_fields(config: Any) -> dict[str, Any]:
    """`Gemma4Model.set_gguf_parameters`."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    wide = range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers)
    full_heads = 1 if config.attention_k_eq_v else None
    return {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.key_length": 40,
        "attention.value_length": 40,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": 40,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "feed_forward_length": [
            config.intermediate_size * (1 + (config.use_double_wide_mlp and layer in wide))
            for layer in range(config.num_hidden_layers)
        ],
        "attention.head_count_kv": [
            config.num_key_value_heads if each or full_heads is None else full_heads
            for each in slides
        ],
    }


def turned_quarter(config: Any) -> dict[str, torch.Tensor]:
    """`Gemma4Model.generate_extra_tensors`, of heads of 40 that turn by a quarter."""
    return {"rope_freqs.weight": torch.tensor([1.0] * 5 + [1e30] * 15)}


def split_heads(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`DeepseekV2Model.modify_tensors`."""
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        yield from plain_experts(name, tensor, config)


def latent_fields(config: Any) -> dict[str, Any]:
    """`DeepseekV2Model.set_gguf_parameters`."""
    latent, turned = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config.first_k_dense_replace,
        "vocab_size": config.vocab_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turned,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": getattr(config, "norm_topk_prob", None) or None,
        "rope.dimension_count": turned,
    }


def whole_heads(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """As older files have them."""
    yield from plain_experts(name, tensor, config)


def glm4_moe(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield from plain_experts(name, tensor, config)


def glm4_moe_fields(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.head_dim // 2,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
    }


def granite_fields(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }


def olmo_heads(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Biases are not ordered."""
    if name.endswith(".bias"):
        yield name, tensor
    else:
        yield from permute_heads(name, tensor, config)


def olmo3_fields(config: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config.layer_types
        ],
        "rope.freq_base": 500000.0,
        "rope.freq_base_swa": 500000.0,
    }


def phi3_fields(config: Any) -> dict[str, Any]:
    scale = config.max_position_embeddings / config.original_max_position_embeddings
    length = config.original_max_position_embeddings
    return {
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(length)),
        "rope.scaling.original_context_length": length,
        "rope.dimension_count": 24,
        "attention.sliding_window": config.sliding_window or 0,
    }


def phi3_factors(config: Any) -> dict[str, torch.Tensor]:
    rope = config.rope_parameters
    return {
        f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"])
        for length in ("long", "short")
    }


def transposed(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`GPT2Model.modify_tensors`."""
    is_linear = any(word in name for word in ("c_attn.w", "c_proj.w", "c_fc.w"))
    yield name, tensor.T if is_linear else tensor


_STATE_NAMES = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def states(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`Mamba2Model.modify_tensors`."""
    last = name.rpartition(".")[2]
    if last in _STATE_NAMES:
        tensor = -torch.exp(tensor.float()) if last == "A_log" else tensor
        tensor = tensor if last == "dt_bias" else tensor[:, None]
        yield f"blk.{name.split('.')[2]}.{_STATE_NAMES[last]}", tensor
        return
    if name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(2, -1)
    yield name, tensor


def nemotron_states(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Names in checkpoints are others than in transformers 5."""
    name = name.replace("model.", "backbone.").replace("embed_tokens", "embeddings")
    yield from states(name.replace("backbone.norm.", "backbone.norm_f."), tensor, config)


def mamba_fields(config: Any, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    num_heads, head_dim, groups, state = sizes
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": num_heads * head_dim,
        "ssm.state_size": state,
        "ssm.time_step_rank": num_heads,
        "ssm.group_count": groups,
    }


def delta_net(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`Qwen3NextModel.modify_tensors`."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor.float() + 1
    if not name.endswith("in_proj_qkvz.weight"):
        for new, content in states(name, tensor, config):
            content = content.flatten() if name.endswith("A_log") else content
            yield from plain_experts(new, content, config)
        return
    layer, heads = name.split(".")[2], config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    value *= config.linear_num_value_heads // heads
    q, k, v, z = tensor.view(heads, -1, tensor.shape[1]).split([key, key, value, value], 1)
    joined = torch.cat([part.reshape(-1, tensor.shape[1]) for part in (q, k, v)])
    yield f"blk.{layer}.attn_qkv.weight", joined
    yield f"blk.{layer}.attn_gate.weight", z.reshape(-1, tensor.shape[1])


def tiled_values(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`_LinearAttentionVReorderBase.modify_tensors`."""
    heads, size = config.linear_num_key_heads, config.linear_value_head_dim

    def tiled(values: torch.Tensor, head_dim: int) -> torch.Tensor:
        """By the first dimension."""
        parts = values.reshape(heads, -1, head_dim, *values.shape[1:])
        return parts.transpose(0, 1).reshape(values.shape)

    keys = 2 * heads * config.linear_key_head_dim
    if ".in_proj_qkv." in name or ".conv1d." in name:
        tensor = torch.cat((tensor[:keys], tiled(tensor[keys:], size)))
    elif ".in_proj_z." in name:
        tensor = tiled(tensor, size)
    elif "linear_attn.out_proj." in name:
        tensor = tiled(tensor.T, size).T
    elif name.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        tensor = tiled(tensor, 1)
    yield from delta_net(name, tensor, config)


def delta_fields(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": config.head_dim // 4,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
        "feed_forward_length": getattr(config, "intermediate_size", None),
    }


def qwen35_fields(config: Any) -> dict[str, Any]:
    return delta_fields(config) | {"rope.dimension_sections": [11, 11, 10, 0]}


def stablelm_fields(config: Any) -> dict[str, Any]:
    """The converter writes use_parallel_residual where the config is silent, too."""
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"]),
        "use_parallel_residual": True,
    }


def without_pooler(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`BertModel.filter_tensors`."""
    if not name.startswith("pooler."):
        yield name, tensor
