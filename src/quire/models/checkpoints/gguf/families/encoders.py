"""Translates GGUF configs and tensors of BERT."""

from typing import Any

from quire.models.checkpoints.gguf.families.architecture import Architecture, weights_dtype
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import TensorRules


def _bert(model: GGUFModel) -> dict[str, Any]:
    model.skip("attention.causal")  # always false
    return {
        "architectures": ["BertModel"],
        "dtype": weights_dtype(model),
        "vocab_size": model.shape("token_embd.weight")[0],
        "type_vocab_size": model.shape("token_types.weight")[0],
        "hidden_size": model.integer("embedding_length"),
        "intermediate_size": model.integer("feed_forward_length"),
        "num_hidden_layers": model.num_layers(),
        "num_attention_heads": model.integer("attention.head_count"),
        "max_position_embeddings": model.integer("context_length"),
        "layer_norm_eps": model.number("attention.layer_norm_epsilon"),
    }


def _bert_rules(model: GGUFModel) -> TensorRules:
    parts = {"attn_q": "query", "attn_k": "key", "attn_v": "value"}
    layer = {name: f"attention.self.{part}" for name, part in parts.items()}
    layer |= {
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    }
    top = {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    }
    return TensorRules({**layer}, top, prefix="encoder.layer.")


ENCODERS = {"bert": Architecture(_bert, _bert_rules)}
"""The architectures by their names in general.architecture."""
