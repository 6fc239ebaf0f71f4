"""Translates GGUF configs and tensors of Falcon-H1, LFM2, Nemotron-H, Qwen3-Next and Qwen3.5.

These families have recurrent states. llama.cpp stores -exp(A_log) in place of A_log and drops the
middle dimension of convolutions. It multiplies Falcon-H1's weights by the model's multipliers, and
reorders Qwen3.5's value heads.
"""

from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.hub.gguf.header import broken
from quire.models.checkpoints.gguf.families.architecture import (
    EXPERTS,
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
)
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import Change, TensorRules

_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_out": "out_proj",
    "ssm_norm": "norm",
}
_WHOLE_MAMBA = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}


def _logarithm(decay: torch.Tensor) -> torch.Tensor:
    return torch.log(-decay).flatten()


def _with_middle(taps: torch.Tensor) -> torch.Tensor:
    return taps[:, None]


_MAMBA_CHANGES: dict[str, Change] = {
    "ssm_a": _logarithm,
    "ssm_d": torch.Tensor.flatten,
    "ssm_norm.weight": torch.Tensor.flatten,
    "ssm_conv1d.weight": _with_middle,
}


def _mamba_layer(parent: str) -> dict[str, str | tuple[str, ...]]:
    return {name: f"{parent}.{ours}" for name, ours in (_MAMBA | _WHOLE_MAMBA).items()}


def _inner_head_dim(model: GGUFModel) -> int:
    """The head size of recurrent states."""
    inner, num_heads = model.integer("ssm.inner_size"), model.integer("ssm.time_step_rank")
    if not num_heads or inner % num_heads:
        raise broken(model.path, f"ssm.inner_size {inner} is no multiple of {num_heads} heads")
    return inner // num_heads


def _falcon_h1(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(
        model,
        "FalconH1ForCausalLM",
        mamba_d_ssm=model.integer("ssm.inner_size"),
        mamba_n_heads=model.integer("ssm.time_step_rank"),
        mamba_d_head=_inner_head_dim(model),
        mamba_n_groups=model.integer("ssm.group_count"),
        mamba_d_state=model.integer("ssm.state_size"),
        mamba_d_conv=model.integer("ssm.conv_kernel"),
        mamba_conv_bias="blk.0.ssm_conv1d.bias" in model.tensors,
        mamba_proj_bias=has_bias(model, "ssm_in"),
        projectors_bias=has_bias(model, "ssm_out"),
        mamba_rms_norm="blk.0.ssm_norm.weight" in model.tensors,
        mamba_norm_before_gate=False,
        attention_bias=has_bias(model, "attn_q"),
        mlp_bias=has_bias(model, "ffn_down"),
    )


def _falcon_h1_rules(model: GGUFModel) -> TensorRules:
    mlp = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    # The stored name lacks ".weight".
    norms = dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")
    return TensorRules(
        LAYER | mlp | norms | _mamba_layer("mamba"),
        TOP | {"output_norm": "model.final_layernorm"},
        changes=_MAMBA_CHANGES,
        unused=ROPE_TENSORS,
    )


def _lfm2(model: GGUFModel) -> dict[str, Any]:
    """The config of LFM2. Layers without KV heads are convolutions."""
    counts = model.integers("attention.head_count_kv")
    return decoder_config(
        model,
        "Lfm2ForCausalLM",
        num_key_value_heads=max(counts),
        layer_types=["full_attention" if count else "conv" for count in counts],
        conv_L_cache=model.integer("shortconv.l_cache"),
        conv_bias=has_bias(model, "shortconv.in_proj"),
        block_auto_adjust_ff_dim=False,
        rms_norm_eps=None,
        norm_eps=model.number("attention.layer_norm_rms_epsilon"),
    )


def _lfm2_rules(model: GGUFModel) -> TensorRules:
    mixer = {f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")}
    return TensorRules(
        LAYER | mixer,
        TOP | {"token_embd_norm": "model.norm"},
        changes={"shortconv.conv.weight": _with_middle},
    )


def _nemotron_h(model: GGUFModel) -> dict[str, Any]:
    """The config of Nemotron-H. A layer is an MLP if it has an MLP size, attention if it has KV
    heads, and otherwise recurrent."""
    sizes = model.integers("feed_forward_length")
    counts = model.integers("attention.head_count_kv")
    letters = [
        "-" if size else "*" if count else "M" for size, count in zip(sizes, counts, strict=True)
    ]
    model.skip("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")
    model.skip("expert_group_count", "expert_group_used_count")  # there are no experts
    return {
        **decoder_config(
            model,
            "NemotronHForCausalLM",
            intermediate_size=max(sizes),
            num_key_value_heads=max(counts),
            rms_norm_eps=None,
            rope_parameters=None,
            num_hidden_layers=None,
        ),
        "layer_norm_epsilon": model.number(
            "attention.layer_norm_rms_epsilon", model.number("attention.layer_norm_epsilon", 1e-5)
        ),
        "hybrid_override_pattern": "".join(letters),
        "mamba_num_heads": model.integer("ssm.time_step_rank"),
        "mamba_head_dim": _inner_head_dim(model),
        "n_groups": model.integer("ssm.group_count"),
        "ssm_state_size": model.integer("ssm.state_size"),
        "conv_kernel": model.integer("ssm.conv_kernel"),
        "use_conv_bias": has_bias(model, "ssm_conv1d"),
        "use_bias": has_bias(model, "ssm_in"),
        "mlp_bias": has_bias(model, "ffn_up"),
    }


def _nemotron_h_rules(model: GGUFModel) -> TensorRules:
    """The rules for Nemotron-H, each of whose layers has one block, the mixer. llama.cpp reorders
    the rows of q and k, as it does for Llama. This needs no `order` rule: without a rotation, the
    scores don't depend on the order."""
    linears = {f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"}
    linears |= {"attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj"}
    linears |= {"ffn_down": "mixer.down_proj", "attn_norm": "norm"}
    return TensorRules(
        {**linears, **_mamba_layer("mixer")}, TOP, changes=_MAMBA_CHANGES, unused=ROPE_TENSORS
    )


def _delta_config(model: GGUFModel, architecture: str, **difference: Any) -> dict[str, Any]:
    """The config fields that Qwen3-Next and Qwen3.5 share."""
    num_layers = model.num_layers() - model.integer("nextn_predict_layers", 0)
    interval = model.integer("full_attention_interval", 4)
    recurrent = [int((layer + 1) % max(1, interval) != 0) for layer in range(num_layers)]
    if model.has("attention.recurrent_layers"):
        recurrent = model.integers("attention.recurrent_layers")[:num_layers]
    model.skip("rope.dimension_sections")  # a text token has the same position on all axes
    return decoder_config(
        model,
        architecture,
        num_hidden_layers=num_layers,
        layer_types=["linear_attention" if each else "full_attention" for each in recurrent],
        linear_num_key_heads=model.integer("ssm.group_count"),
        linear_num_value_heads=model.integer("ssm.time_step_rank"),
        linear_key_head_dim=model.integer("ssm.state_size"),
        linear_value_head_dim=_inner_head_dim(model),
        linear_conv_kernel_dim=model.integer("ssm.conv_kernel"),
        attention_bias=has_bias(model, "attn_q"),
        **difference,
    )


def _experts(model: GGUFModel) -> dict[str, int]:
    return {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.integer("expert_shared_feed_forward_length"),
    }


def _qwen3next(model: GGUFModel) -> dict[str, Any]:
    return _delta_config(model, "Qwen3NextForCausalLM", norm_topk_prob=True, **_experts(model))


def _qwen35(model: GGUFModel) -> dict[str, Any]:
    return _delta_config(model, "Qwen3_5ForCausalLM")


def _qwen35moe(model: GGUFModel) -> dict[str, Any]:
    size = model.integer("feed_forward_length", 0) or None
    return _delta_config(model, "Qwen3_5MoeForCausalLM", intermediate_size=size, **_experts(model))


_DELTA_LAYER: dict[str, str | tuple[str, ...]] = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")


def _without_one(weights: torch.Tensor) -> torch.Tensor:
    return weights - 1


def _delta_changes() -> dict[str, Change]:
    norms: dict[str, Change] = {f"{name}.weight": _without_one for name in _NORMS}
    return norms | {"ssm_a": _logarithm, "ssm_conv1d.weight": _with_middle}


def _num_layers(model: GGUFModel) -> int:
    return max(0, model.num_layers() - model.integer("nextn_predict_layers", 0))


def _qwen3next_rules(model: GGUFModel) -> TensorRules:
    keys = model.integer("ssm.group_count") * model.integer("ssm.state_size")
    own: dict[str, str | tuple[str, ...]] = {
        "attn_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv"),
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_ba": "linear_attn.in_proj_ba",
    }
    return TensorRules(
        LAYER | EXPERTS | _DELTA_LAYER | own,
        TOP,
        sizes={"attn_qkv": (keys, keys, model.integer("ssm.inner_size"))},
        changes=_delta_changes(),
        unused=ROPE_TENSORS,
        num_layers=_num_layers(model),
    )


def _qwen35_rules(model: GGUFModel) -> TensorRules:
    num_k_heads, num_v_heads = model.integer("ssm.group_count"), model.integer("ssm.time_step_rank")
    keys, size = num_k_heads * model.integer("ssm.state_size"), _inner_head_dim(model)
    _check_heads(model, num_k_heads, num_v_heads, keys)
    own: dict[str, str | tuple[str, ...]] = {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    }
    # Value heads are stored interleaved: first the first value head of each key head, then the
    # second value head of each, and so on.
    heads = torch.arange(num_v_heads).view(-1, num_k_heads).T.flatten()
    values = (heads[:, None] * size + torch.arange(size)).flatten()
    # In tensors of q, k and v, the rows of q and k come first and are not reordered.
    behind = torch.cat((torch.arange(2 * keys), 2 * keys + values))

    def logarithm(decay: torch.Tensor) -> torch.Tensor:
        return _logarithm(decay)[heads.to(decay.device)]

    def ordered_taps(taps: torch.Tensor) -> torch.Tensor:
        return _with_middle(taps)[behind.to(taps.device)]

    return TensorRules(
        LAYER | EXPERTS | _DELTA_LAYER | own,
        TOP,
        order={
            "attn_qkv": behind,
            "attn_gate": values,
            "ssm_alpha": heads,
            "ssm_beta": heads,
            "ssm_dt": heads,
        },
        inputs={"ssm_out.weight": values},
        changes=_delta_changes() | {"ssm_a": logarithm, "ssm_conv1d.weight": ordered_taps},
        unused=ROPE_TENSORS,
        num_layers=_num_layers(model),
    )


def _check_heads(model: GGUFModel, num_k_heads: int, num_v_heads: int, keys: int) -> None:
    """Raises UnsupportedModelError for head counts that don't match the tensors. Runs before
    anything of their size is allocated."""
    values = model.integer("ssm.inner_size")
    stored = {
        name: model.shape(name)[0] for name in model.tensors if name.endswith(".attn_qkv.weight")
    }
    if not num_k_heads or num_v_heads % num_k_heads or {*stored.values()} != {2 * keys + values}:
        raise UnsupportedModelError(
            f"{model.path}: the tensors of linear attention don't have {num_k_heads} key heads and "
            f"{num_v_heads} value heads"
        )


HYBRIDS = {
    "falcon-h1": Architecture(_falcon_h1, _falcon_h1_rules),
    "lfm2": Architecture(_lfm2, _lfm2_rules),
    "nemotron_h": Architecture(_nemotron_h, _nemotron_h_rules),
    "qwen35": Architecture(_qwen35, _qwen35_rules),
    "qwen35moe": Architecture(_qwen35moe, _qwen35_rules),
    "qwen3next": Architecture(_qwen3next, _qwen3next_rules),
}
"""The architectures by their names in general.architecture."""
