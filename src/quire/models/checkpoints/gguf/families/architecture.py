"""The translation of a llama.cpp architecture to a Hugging Face checkpoint.

Holds the config fields and tensor names that most decoders share. The other modules of this folder
describe how each family differs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.models.checkpoints.gguf.decoding import plain_dtype
from quire.models.checkpoints.gguf.families.ropes import rope_parameters
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import EXPERT, TensorRules, misshapen

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER: dict[str, str | tuple[str, ...]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS: dict[str, str | tuple[str, ...]] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Names of tensors that only `ropes` reads."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The translation of an architecture. Its functions raise CheckpointError."""

    #: Makes the fields of config.json.
    config: Callable[[GGUFModel], dict[str, Any]]
    #: Makes the rules for tensors.
    rules: Callable[[GGUFModel], TensorRules]


def decoder_config(model: GGUFModel, architecture: str, **difference: Any) -> dict[str, Any]:
    """The config fields that decoders share. `architecture` is the name of the Hugging Face class.

    `difference` holds additional fields, and fields that replace shared ones. A field that is None
    is omitted.
    """
    num_heads = model.integer("attention.head_count")
    hidden_size = model.integer("embedding_length")
    head_dim = hidden_size // max(1, num_heads)
    head_dim = difference.get("head_dim", model.integer("attention.key_length", head_dim))
    model.skip("vocab_size", "attention.value_length")  # the tensors show them
    shared: dict[str, Callable[[], Any]] = {
        "architectures": lambda: [architecture],
        "dtype": lambda: weights_dtype(model),
        "vocab_size": lambda: model.shape("token_embd.weight")[0],
        "hidden_size": lambda: hidden_size,
        "intermediate_size": lambda: model.integer("feed_forward_length"),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": lambda: num_heads,
        "num_key_value_heads": lambda: model.integer("attention.head_count_kv", num_heads),
        "head_dim": lambda: head_dim,
        "max_position_embeddings": lambda: model.integer("context_length"),
        "tie_word_embeddings": lambda: "output.weight" not in model.tensors,
        "rms_norm_eps": lambda: model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": lambda: rope_parameters(model, head_dim),
    }
    fields = {
        name: difference[name] if name in difference else read() for name, read in shared.items()
    } | difference
    return {name: value for name, value in fields.items() if value is not None}


def has_bias(model: GGUFModel, linear: str) -> bool:
    """Whether the linear has a bias in any layer."""
    return any(name.endswith(f".{linear}.bias") for name in model.tensors)


def weights_dtype(model: GGUFModel) -> str:
    """The dtype for the config: float32 or float16 if all matrices have this dtype. Otherwise
    bfloat16, for which CPU kernels are fastest."""
    plain = {
        plain_dtype(model.info(name).storage)
        for name in model.tensors
        if len(model.shape(name)) > 1 and "ffn_gate_inp" not in name  # routers are always fp32
    }
    for dtype in (torch.float32, torch.float16):
        if plain == {dtype}:
            return str(dtype).removeprefix("torch.")
    return "bfloat16"


def of_pairs(num_heads: int, head_dim: int) -> torch.Tensor:
    """The stored index of each row of q or k. llama.cpp reorders the rows for an interleaved
    rotation: rows i and i + head_dim / 2 of a head are stored as neighbours."""
    row, half = torch.arange(head_dim), head_dim // 2
    head = 2 * (row % half) + row // half
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


def permuted(model: GGUFModel) -> dict[str, torch.Tensor]:
    """The `order` rule for models whose q and k are stored for an interleaved rotation."""
    num_heads = model.integer("attention.head_count")
    counts = {
        "attn_q": num_heads,
        "attn_k": model.integer("attention.head_count_kv", num_heads),
    }
    found = {}
    for linear, count in counts.items():
        num_rows = model.shape(f"blk.0.{linear}.weight")[0]
        if not count or num_rows % (2 * count):
            raise misshapen(model, f"blk.0.{linear}.weight")
        found[linear] = of_pairs(count, num_rows // count)
    return found
